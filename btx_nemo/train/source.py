"""Where a model's weights come from: a Hugging Face folder, one of our checkpoints, or a fresh start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from btx_nemo.families import source as families_source
from btx_nemo.families.base import to_megatron
from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.execute import TensorReader
from btx_nemo.plan.expr import Expr, Full, Normal, Take


@dataclass(frozen=True)
class ModelSource:
    """An architecture, and every weight of it as an expression over lazy readers."""

    model: ModelConfig
    expressions: Mapping[str, Expr]
    """Canonical Megatron key -> global tensor."""
    readers: Mapping[str, TensorReader] = field(default_factory=dict)
    tokenizer: Path | None = None
    """Folder with tokenizer files, where the source has them."""


def fresh_source(model: ModelConfig) -> ModelSource:
    """A new model: N(0, init_std^2), divided by sqrt(2 L) where a layer writes to the residual stream, norms at one.

    The weights depend on the seed and each tensor's name alone, so that every layout starts from the same model.
    """

    def weights(key: str) -> Expr:
        if "norm" in key:
            return Full(1.0)
        if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
            return Normal(model.init_std / math.sqrt(2 * model.num_layers))
        return Normal(model.init_std)

    return ModelSource(model=model, expressions={key: weights(key) for key in to_megatron(model)})


def open_source(folder: Path) -> ModelSource:
    """A Hugging Face folder, a checkpoint of ours, or a run directory (its latest checkpoint). Reads no tensor.

    Raises UserError when `folder` is none of these, or is damaged.
    """
    source = families_source.open_source(folder)
    families_source.check_tied(source)
    keys = to_megatron(source.config)
    expressions = keys if source.kind == "hf" else {key: Take(source.name, key) for key in keys}
    return ModelSource(
        model=source.config,
        expressions=expressions,
        readers={source.name: source.reader},
        tokenizer=source.tokenizer,
    )
