"""A model's parameters by the names that `train` and `freeze` match, known before anything is built."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from math import prod

from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.plan.expr import infer
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.train.source import ModelSource

_LOCAL = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms, which checkpoints and Transformer Engine's layers have inside the next linear layer, Megatron's own before."""
_AFTER = {"post_self_attn_layernorm": "self_attn_bda", "post_mlp_layernorm": "mlp_bda"}
_BUFFERS = (".router.domain_embeddings",)
"""What a checkpoint holds besides parameters."""


def parameter_sizes(source: ModelSource) -> dict[str, int]:
    """Name, as `freeze.global_names` has it, -> elements. The padding of the vocabulary is not counted."""
    layouts = {name: reader.layout() for name, reader in source.readers.items()}
    sizes: dict[str, int] = {}
    for key, expression in source.expressions.items():
        if key.endswith(_BUFFERS):
            continue
        shape = infer(expression, layouts, TensorInfo((), "float32")).shape
        name = _name(key)
        if ".experts.experts." not in name:
            sizes[name] = prod(shape)
            continue
        for expert in range(shape[0]):
            sizes[name.replace(".experts.experts.", f".experts.local_experts.{expert}.")] = prod(shape[1:])
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
        states.setdefault(_every(name, "expert"), set()).add(name in frozen)
    groups: dict[tuple[str, bool], list[int]] = {}
    for name, size in sizes.items():
        wide = _every(name, "expert")
        label = _every(wide if len(states[wide]) == 1 else name, "layer")
        groups.setdefault((label, name not in frozen), []).append(size)
    return [(label, len(found), sum(found), trains) for (label, trains), found in groups.items()]


def _every(name: str, what: str) -> str:
    pattern = r"(?<=\.local_experts\.)\d+" if what == "expert" else r"(?<=^decoder\.layers\.)\d+"
    return re.sub(pattern, "*", name)
