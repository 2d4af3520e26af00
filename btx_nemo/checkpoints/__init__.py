"""Lazy readers and atomic, streaming writers of checkpoints: safetensors folders and Megatron's torch_dist format."""
