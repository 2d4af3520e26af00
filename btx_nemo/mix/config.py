"""What a mix needs to be told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from btx_nemo.config.build import build
from btx_nemo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """One mix, or one operation on a mixture: which models, by which recipe, into which folder."""

    recipe: str = "btx"
    """Name in the recipe registry (`btx_nemo.mix.recipes`)."""
    seed: str
    """The model that the specialists started from: a Hugging Face folder or hub id, a checkpoint or a run directory.

    An operation is given the mixture here, on the command line as `in`.
    """
    experts: dict[str, str] = field(default_factory=dict)
    """Specialists in order: name -> folder or hub id, of the same kinds."""
    out: str
    """Folder to write. Must not exist."""
    format: str = "hf"
    """What to write: `hf`, a Hugging Face folder, or `megatron`, a distributed checkpoint that training starts from."""
    target: str | None = None
    """Hugging Face's model_type to write; None for the first that computes what the mixture does."""
    top_k: int | None = None
    """Experts per token of the mixture; None for the recipe's."""
    router_init_std: float | None = None
    """Standard deviation of fresh routers; None for the recipe's."""
    rng_seed: int = 0
    """Seed of everything random in the mix."""
    dtype: str | None = None
    """Dtype of the result (`bfloat16`, `float32`, `float16`); None keeps the sources'."""
    vocab_policy: str = "error"
    """What to do where the models' embeddings have different rows (`btx_nemo.mix.vocabulary`).

    `error`; `pad`, one tokenizer and embeddings of different length; `union`, tokenizers that differ in added tokens.
    """
    allow_bin: bool = False
    """Whether pytorch_model.bin, a pickle, may be read where there are no safetensors: tensors only, no code."""
    shard_size: int = 5_000_000_000
    """Bytes of one safetensors shard, at most."""
    workers: int | None = None
    """Threads; None: two per CPU, at most eight."""
    missing: list[str] = field(default_factory=list)
    """Specialists that were meant to be in it and are not (`submit --allow-missing`); the manifest names them."""
    options: dict[str, Any] = field(default_factory=dict)
    """The recipe's own settings: the fields of its `Options`; on the command line they stand beside the others."""


def read_config(values: Mapping[str, Any], where: str) -> MixConfig:
    """MixConfig of a flat mapping, in which a recipe's own settings stand beside the common ones.

    Raises UserError for an unknown key, listing those that the recipe and every mix know.
    """
    from btx_nemo.mix.recipes import get_recipe

    values = dict(values)
    recipe = get_recipe(str(values.get("recipe", "btx")))
    if "in" in values:
        if "seed" in values:
            raise UserError(f"{where}: in and seed are both given; give one")
        values["seed"] = values.pop("in")
    elif recipe.on_mixture and "seed" not in values:
        raise UserError(f"{where}: in is required; give in=DIR, the mixture")
    common = {f.name for f in dataclasses.fields(MixConfig)} - {"options"}
    own = [f.name for f in dataclasses.fields(recipe.options)]
    for key in values:
        if key not in common and key not in own:
            listed = f"; known for recipe={recipe.name}: {', '.join(own)}" if own else ""
            raise UserError(f"{where}: unknown key {key}{listed}; known for every mix: {', '.join(sorted(common))}")
    options = {key: values.pop(key) for key in own if key in values}
    build(recipe.options, options, where=where)
    return build(MixConfig, {**values, "options": options}, where=where)
