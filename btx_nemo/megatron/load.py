"""Weights into a sharded live model: each rank evaluates, and so reads, only its own slices of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from btx_nemo.families.table import VOCABULARY
from btx_nemo.plan.execute import TensorReader, evaluate
from btx_nemo.plan.expr import Concat, Expr, Full, infer
from btx_nemo.plan.layout import Layout, TensorInfo

METADATA = {"non_homogeneous_layers": True, "distrib_optim_sharding_type": "fully_reshardable"}
"""How Megatron names what it saves: a key a layer, and optimizer state that any layout can load.

Give it a copy: it writes its process group into the dict that it is given, and that group ends with the layout.
"""


def sharded_tensors(gpt: Any) -> Iterator[Any]:
    """Megatron's ShardedTensor of every parameter of this rank; their `data` are views of the parameters."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = gpt.sharded_state_dict(metadata=dict(METADATA))
    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            yield value


@torch.no_grad()
def load_weights(gpt: Any, expressions: Mapping[str, Expr], readers: Mapping[str, TensorReader], *, seed: int) -> None:
    """Fills this rank's parameters and saved buffers from `expressions` (canonical Megatron key -> global tensor).

    Raises RuntimeError when a parameter has no expression, the wrong shape, or is not reached: nothing stays undefined.
    """
    sources = {name: reader.layout() for name, reader in readers.items()}
    filled = 0
    for shard in sharded_tensors(gpt):
        if shard.key not in expressions:
            raise RuntimeError(f"no weights for {shard.key}; the plan has {sorted(expressions)[:5]} ...")
        info = TensorInfo(tuple(shard.global_shape), str(shard.data.dtype).removeprefix("torch."))
        expression = _padded(expressions[shard.key], shard.key, info, sources)
        found = infer(expression, sources, info).shape
        if tuple(found) != info.shape:
            raise RuntimeError(f"{shard.key}: the plan gives {list(found)}, the model has {list(info.shape)}")
        box = tuple((start, start + size) for start, size in zip(shard.global_offset, _local_shape(shard)))
        value = evaluate(expression, readers, info, shard.key, seed, box)
        shard.data.copy_(value.view(shard.data.shape))
        filled += shard.data.numel()
    expected = sum(parameter.numel() for parameter in gpt.parameters()) + sum(_saved_buffers(gpt))
    if filled != expected:
        raise RuntimeError(f"{filled} of the model's {expected} numbers were given weights")


def _padded(expression: Expr, key: str, info: TensorInfo, sources: Mapping[str, Layout]) -> Expr:
    """The rows of a vocabulary, and zeros up to as many as the model has of them."""
    if key not in VOCABULARY:
        return expression
    found = infer(expression, sources, info)
    missing = info.shape[0] - found.shape[0]
    zeros = Full(0.0, TensorInfo((missing, *found.shape[1:]), found.dtype))
    return Concat((expression, zeros), 0) if missing > 0 else expression


def _saved_buffers(gpt: Any) -> Iterator[int]:
    for module in gpt.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer.numel()


def _local_shape(shard: Any) -> tuple[int, ...]:
    # Axes that Megatron puts in front (the expert's) are not in the local shape; a shard holds one entry of each.
    return (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
