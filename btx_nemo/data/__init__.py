"""From text to batches: tokenise, index, blend by weights, sample; and the demo corpora."""
