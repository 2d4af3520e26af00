"""Model families: one declarative table each, used in both directions between Hugging Face and Megatron."""
