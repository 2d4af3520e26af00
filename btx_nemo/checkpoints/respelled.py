"""Megatron checkpoints whose keys are not a key a layer and expert stack: other metadata, the same tensors.

What Megatron-Core's `sharded_state_dict` can be told, and what becomes of the keys:

    (nothing)                      decoder.layers.self_attention...            a leading axis over layers
    singleton_local_shards=True    ...mlp.experts.experts.{e}.linear_fc1...    a key per expert
                                   ...linear_fc1.weight_w, ...weight_v         gate and up projection apart

SequentialMLP, GroupedMLP and TEGroupedMLP all use these, so that their checkpoints read alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from btx_nemo.checkpoints.reader import Reader
from btx_nemo.errors import UserError
from btx_nemo.plan.evaluate import evaluate
from btx_nemo.plan.expr import Concat, Expr, Index, Stack, Take, infer
from btx_nemo.plan.layout import Box, Layout

_SOURCE = "stored"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_EXPERT = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts\.experts\.)(\d+)\.(.+)")


class RespelledReader(Reader):
    """Another reader under Megatron's keys per layer; values are read from it piece by piece."""

    def __init__(self, reader: Reader, table: Mapping[str, Expr]) -> None:
        self.reader = reader
        self.table = dict(table)
        layouts = {_SOURCE: reader.layout()}
        self._layout = {key: infer(expr, layouts) for key, expr in self.table.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    def layout(self) -> Layout:
        """Keys per layer, experts stacked."""
        return self._layout

    def where(self, name: str) -> str:
        """The file of the tensor's first part."""
        expr = self.table[name]
        while not isinstance(expr, Take):
            expr = expr.parts[0] if isinstance(expr, (Concat, Stack)) else expr.of  # type: ignore[union-attr]
        return self.reader.where(expr.name)

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read one part; only the bytes that it needs."""
        out.copy_(evaluate(self.table[name], {_SOURCE: self.reader}, self._layout[name], name, 0, box))


def respelled(reader: Reader) -> Reader:
    """The reader itself where its keys are a key a layer already, else one that shows them so. Raises UserError."""
    layout = reader.layout()
    table = _with_experts_stacked(_with_halves_joined(_with_layers_apart(layout)))
    if table.keys() == layout.keys():
        return reader
    return RespelledReader(reader, table)


def _with_layers_apart(layout: Layout) -> dict[str, Expr]:
    table: dict[str, Expr] = {}
    for key, info in layout.items():
        found = _STACKED.fullmatch(key)
        if found is None or not info.shape:
            table[key] = Take(_SOURCE, key)
            continue
        for layer in range(info.shape[0]):
            table[f"decoder.layers.{layer}.{found[1]}"] = Index(Take(_SOURCE, key), layer)
    return table


def _with_halves_joined(table: dict[str, Expr]) -> dict[str, Expr]:
    result: dict[str, Expr] = {}
    for key, expr in table.items():
        if key.endswith("weight_w") and f"{key[:-1]}v" in table:
            result[key.removesuffix("_w")] = Concat((expr, table[f"{key[:-1]}v"]), 0)
        elif not (key.endswith("weight_v") and f"{key[:-1]}w" in table):
            result[key] = expr
    return result


def _with_experts_stacked(table: dict[str, Expr]) -> dict[str, Expr]:
    result: dict[str, Expr] = {}
    experts: dict[str, dict[int, Expr]] = {}
    for key, expr in table.items():
        found = _EXPERT.fullmatch(key)
        if found is None:
            result[key] = expr
        else:
            experts.setdefault(found[1] + found[3], {})[int(found[2])] = expr
    for key, parts in experts.items():
        if sorted(parts) != list(range(len(parts))):
            lost = next(number for number in range(len(parts)) if number not in parts)
            raise UserError(f"checkpoint: {key} of expert {lost} is missing, although there are {len(parts)}")
        result[key] = Stack(tuple(parts[number] for number in range(len(parts))))
    return result
