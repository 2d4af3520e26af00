"""Conversions between Hugging Face folders and Megatron checkpoints: plans, streamed, bit-exact both ways."""
