"""Operations on an assembled mixture, without the other experts' training: recipes whose seed is the mixture (`in`)."""
