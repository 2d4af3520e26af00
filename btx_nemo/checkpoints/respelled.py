"""Megatron checkpoints whose keys are not a key a layer and expert stack: other metadata, the same tensors.

What Megatron-Core's `sharded_state_dict` can be told, and what becomes of the keys:

    (nothing)                      decoder.layers.self_attention...            a leading axis over layers
    singleton_local_shards=True    ...mlp.experts.experts.{e}.linear_fc1...    a key per expert
                                   ...linear_fc1.weight_w, ...weight_v         gate and up projection apart

SequentialMLP, GroupedMLP and TEGroupedMLP all use these, whatever their weights look like in memory, so that their
checkpoints read alike, and each reads what another has written (tests/checkpoints/test_expert_layers.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from btx_nemo.checkpoints.reader import Reader
from btx_nemo.errors import UserError
from btx_nemo.plan.evaluate import evaluate
from btx_nemo.plan.expr import Concat, Expr, Index, Slice, Stack, Take, infer
from btx_nemo.plan.layout import Box, Layout

SPELLINGS: dict[str, dict[str, bool]] = {
    "stacked": {"non_homogeneous_layers": True, "singleton_local_shards": False},
    "apart": {"non_homogeneous_layers": True, "singleton_local_shards": True},
}
"""How experts can be written -> the metadata by which Megatron-Core spells a model's keys so."""
_SOURCE = "stored"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_EXPERTS = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts\.experts\.)(linear_.+)")
_GATE_AND_UP = re.compile(r"decoder\.layers\.\d+\.mlp\..*linear_fc1\.weight")
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


def experts_apart(table: Mapping[str, Expr], layout: Layout) -> dict[str, Expr]:
    """The same tensors spelled as `apart`: a key an expert, and gate and up projections under keys of their own.

    `table` has Megatron's keys a layer, `layout` their shapes; `respelled` undoes it.
    """
    single: dict[str, tuple[Expr, int]] = {}
    for key, expr in table.items():
        found = _EXPERTS.fullmatch(key)
        if found is None:
            single[key] = (expr, layout[key].shape[0] if layout[key].shape else 0)
            continue
        for number in range(layout[key].shape[0]):
            single[f"{found[1]}{number}.{found[2]}"] = (Index(expr, number), layout[key].shape[1])
    result: dict[str, Expr] = {}
    for key, (expr, rows) in single.items():
        if _GATE_AND_UP.fullmatch(key):
            result[f"{key}_w"], result[f"{key}_v"] = Slice(expr, 0, 0, rows // 2), Slice(expr, 0, rows // 2, rows)
        else:
            result[key] = expr
    return result


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
