"""Branch-Train-MiX and its relatives on Megatron-Core: dense specialists in, one mixture of experts out."""

__version__ = "0.1.0"
