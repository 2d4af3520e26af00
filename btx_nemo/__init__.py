"""Branch-Train-MiX and its relatives on Megatron-Core: dense specialists in, one mixture of experts out."""

__version__ = "0.1.0"


def register_auto_classes() -> None:
    """Make transformers' Auto classes know our own model, `btx_moe`; see `btx_nemo.convert.hf_moe`."""
    from btx_nemo.convert.hf_moe import register_auto_classes

    register_auto_classes()
