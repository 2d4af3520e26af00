"""What a mix needs to be told."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """One mix: which models, by which recipe, into which folder."""

    recipe: str = "btx"
    """Name in the recipe registry (`btx_nemo.mix.recipes`)."""
    seed: str
    """Folder of the model that the specialists started from: Hugging Face, Megatron checkpoint or run directory."""
    experts: dict[str, str] = field(default_factory=dict)
    """Specialists in order: name -> folder, of the same kinds."""
    out: str
    """Folder to write. Must not exist."""
    format: str = "hf"
    """What to write: `hf`, a Hugging Face folder, or `megatron`, a distributed checkpoint that training starts from."""
    target: str | None = None
    """Hugging Face's model_type to write; None for the first that computes what the mixture does."""
    include_seed: bool = True
    """Whether the seed is an expert too, the generalist, after the specialists (BTX section 3)."""
    top_k: int = 2
    """Experts per token of the mixture."""
    router_init_std: float = 0.02
    """Standard deviation of the fresh routers."""
    rng_seed: int = 0
    """Seed of everything random in the mix."""
    dtype: str | None = None
    """Dtype of the result (`bfloat16`, `float32`, `float16`); None keeps the sources'."""
    shard_size: int = 5_000_000_000
    """Bytes of one safetensors shard, at most."""
    workers: int | None = None
    """Threads; None: as many as there are CPUs, at most eight."""
    missing: list[str] = field(default_factory=list)
    """Specialists that were meant to be in it and are not (`submit --allow-missing`); the manifest names them."""
