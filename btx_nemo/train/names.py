"""A model's parameters by the names that `train` and `freeze` match, known before anything is built."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from math import prod

from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.families.base import get_family
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import fill

LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
"""The number of a parameter's layer, in its name."""
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
"""The number of a parameter's expert."""
_LOCAL = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms, which checkpoints and Transformer Engine's layers have inside the next linear layer, Megatron's own before."""
_AFTER = {"post_self_attn_layernorm": "self_attn_bda", "post_mlp_layernorm": "mlp_bda"}
_BUFFERS = (".router.domain_embeddings",)
"""What a checkpoint holds besides parameters."""


def parameter_sizes(model: ModelConfig) -> dict[str, int]:
    """Name, as `freeze.global_names` has it, -> elements. The padding of the vocabulary is not counted."""
    sizes: dict[str, int] = {}
    for key, parts, _ in fill(get_family(model.family).table, model):
        if key.endswith(_BUFFERS):
            continue
        name, size = _name(key), sum(prod(shape) for _, shape in parts)
        if ".experts.experts." not in name:
            sizes[name] = size
            continue
        assert model.moe is not None
        for expert in range(model.moe.num_experts):
            named = name.replace(".experts.experts.", f".experts.local_experts.{expert}.")
            sizes[named] = size // model.moe.num_experts
    return sizes


def _name(key: str) -> str:
    layer, _, part = key.rpartition("decoder.layers.")[2].partition(".")
    if not key.startswith("decoder.layers."):
        return key
    first, _, rest = part.partition(".")
    if first in _AFTER:
        return f"decoder.layers.{layer}.{_AFTER[first]}.{rest}"
    return f"decoder.layers.{layer}.{local_name(part)}"


def local_name(part: str) -> str:
    """A parameter's name within its layer, as Megatron's own layers have it."""
    return _LOCAL.get(part, part)


def frozen_names(names: Sequence[str], config: TrainConfig) -> set[str]:
    """The names that do not train. Raises UserError for a pattern that matches none, and where nothing trains."""
    for key, pattern in [("freeze", p) for p in config.freeze] + [("train", p) for p in config.train]:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UserError(f"{key}: {pattern!r} matches no parameter; names look like {names[0]!r}")
    frozen = {name for name in names if not config.trains(name)}
    if len(frozen) == len(names):
        raise UserError(f"freeze: {config.freeze} leaves nothing to train; drop a pattern")
    return frozen


def grouped(sizes: Mapping[str, int], frozen: set[str]) -> list[tuple[str, int, int, bool]]:
    """(name with * for what is alike, tensors, elements, whether they train), in the model's order.

    Layers are alike where they share a state; experts where all of them do.
    """
    states: dict[str, set[bool]] = {}
    for name in sizes:
        states.setdefault(EXPERT.sub("*", name), set()).add(name in frozen)
    groups: dict[tuple[str, bool], list[int]] = {}
    for name, size in sizes.items():
        wide = EXPERT.sub("*", name)
        label = LAYER.sub("*", wide if len(states[wide]) == 1 else name)
        groups.setdefault((label, name not in frozen), []).append(size)
    return [(label, len(found), sum(found), trains) for (label, trains), found in groups.items()]
