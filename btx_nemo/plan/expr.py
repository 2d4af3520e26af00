"""Expressions over source tensors: what a target tensor is made of, with no tensor read.

`push_down` moves slices to the leaves, so that evaluating a part of a target reads only the bytes it needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from btx_nemo.errors import UserError
from btx_nemo.plan.layout import Box, Layout, TensorInfo, full_box


@dataclass(frozen=True)
class Take:
    """A source tensor as it is."""

    source: str
    name: str


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of `of` along `dim`."""

    of: Expr
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Index:
    """Entry `index` of `of` along dimension 0, which disappears: the inverse of `Stack`."""

    of: Expr
    index: int


@dataclass(frozen=True)
class Concat:
    """The parts one after the other along an existing `dim`."""

    parts: tuple[Expr, ...]
    dim: int = 0


@dataclass(frozen=True)
class Stack:
    """The parts along a new dimension 0."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Mean:
    """The uniform mean, accumulated in fp32 in the order of the parts, then divided by their number."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Normal:
    """Fresh weights N(0, std^2), seeded by (seed, key)."""

    std: float
    cut: float = 0.0
    """Deviations at which the normal is truncated; 0 for not at all."""
    key: str = ""
    """What they are seeded by; empty for the target's name."""
    info: TensorInfo | None = None
    """Their shape and dtype; None for the target's."""


@dataclass(frozen=True)
class Full:
    """One value everywhere."""

    value: float
    info: TensorInfo | None = None
    """Shape and dtype; None for the target's."""


Expr: TypeAlias = Take | Slice | Index | Concat | Stack | Mean | Normal | Full
FRESH = (Normal, Full)


def generator_for(seed: int, target_name: str) -> torch.Generator:
    """A generator that depends on (seed, target name) alone: order, parallelism and layout cannot change a result."""
    digest = hashlib.sha256(f"{seed}/{target_name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def bind(expr: Expr, target: str, info: TensorInfo) -> Expr:
    """A fresh target's expression with its name and shape in it, so that it may become a part of another tensor."""
    if isinstance(expr, Normal):
        return Normal(expr.std, expr.cut, expr.key or target, expr.info or info)
    if isinstance(expr, Full):
        return Full(expr.value, expr.info or info)
    return expr


def infer(expr: Expr, sources: Mapping[str, Layout], target: TensorInfo | None = None) -> TensorInfo:
    """Shape and dtype of an expression; `target` is what fresh tensors (`Normal`, `Full`) take theirs from.

    Raises UserError naming the tensor when a source lacks it or when parts do not fit together.
    """
    if isinstance(expr, Take):
        layout = sources.get(expr.source)
        if layout is None:
            raise UserError(f"plan: unknown source {expr.source!r}; known: {', '.join(sources)}")
        if expr.name not in layout:
            raise UserError(
                f"source {expr.source!r} has no tensor {expr.name!r}; is it the architecture it says it is?"
            )
        return layout[expr.name]
    if isinstance(expr, FRESH):
        if expr.info is not None:
            return expr.info
        if target is None:
            raise UserError(f"plan: {describe(expr)} can only be a whole target")
        return target
    if isinstance(expr, Slice):
        return _infer_slice(expr, infer(expr.of, sources, target))
    if isinstance(expr, Index):
        of = infer(expr.of, sources, target)
        if not of.shape or not 0 <= expr.index < of.shape[0]:
            raise UserError(f"plan: {describe(expr)} is outside of shape {list(of.shape)}")
        return TensorInfo(of.shape[1:], of.dtype)
    return _infer_parts(expr, [infer(part, sources, target) for part in expr.parts])


def _infer_slice(expr: Slice, of: TensorInfo) -> TensorInfo:
    if not 0 <= expr.dim < len(of.shape) or not 0 <= expr.start <= expr.stop <= of.shape[expr.dim]:
        raise UserError(f"plan: {describe(expr)} is outside of shape {list(of.shape)}")
    shape = (*of.shape[: expr.dim], expr.stop - expr.start, *of.shape[expr.dim + 1 :])
    return TensorInfo(shape, of.dtype)


def _infer_parts(expr: Concat | Stack | Mean, infos: list[TensorInfo]) -> TensorInfo:
    if not infos:
        raise UserError(f"plan: {describe(expr)} has no parts")
    first = infos[0]
    along = expr.dim if isinstance(expr, Concat) else -1

    def rest(info: TensorInfo) -> tuple[object, ...]:
        return (info.dtype, *(size for dim, size in enumerate(info.shape) if dim != along))

    for part, info in zip(expr.parts, infos, strict=True):
        if rest(info) != rest(first) or len(info.shape) != len(first.shape):
            raise UserError(
                f"{describe(part)} is {list(info.shape)} {info.dtype} but {describe(expr.parts[0])} is "
                f"{list(first.shape)} {first.dtype}; they must agree"
            )
    if isinstance(expr, Stack):
        return TensorInfo((len(infos), *first.shape), first.dtype)
    if isinstance(expr, Concat):
        total = sum(info.shape[along] for info in infos)
        return TensorInfo((*first.shape[:along], total, *first.shape[along + 1 :]), first.dtype)
    return first


def push_down(expr: Expr, sources: Mapping[str, Layout], target: TensorInfo | None = None) -> Expr:
    """Move every slice of `expr` to its leaves, so that only needed parts of source tensors are named."""
    if isinstance(expr, Slice):
        return narrow(push_down(expr.of, sources, target), expr.dim, expr.start, expr.stop, sources, target)
    if isinstance(expr, Index):
        return _index(push_down(expr.of, sources, target), expr.index, sources, target)
    if isinstance(expr, Concat):
        return Concat(tuple(push_down(part, sources, target) for part in expr.parts), expr.dim)
    if isinstance(expr, (Stack, Mean)):
        return type(expr)(tuple(push_down(part, sources, target) for part in expr.parts))
    return expr


def _index(of: Expr, index: int, sources: Mapping[str, Layout], target: TensorInfo | None) -> Expr:
    if isinstance(of, Stack):
        return of.parts[index]
    return Index(narrow(of, 0, index, index + 1, sources, target), 0)


def narrow(
    expr: Expr, dim: int, start: int, stop: int, sources: Mapping[str, Layout], target: TensorInfo | None = None
) -> Expr:
    """`Slice(expr, dim, start, stop)` with the slice at the leaves; `expr` is already pushed down."""
    shape = infer(expr, sources, target).shape
    if (start, stop) == (0, shape[dim]):
        return expr
    if isinstance(expr, Slice):
        if expr.dim == dim:
            return Slice(expr.of, dim, expr.start + start, expr.start + stop)
        return Slice(narrow(expr.of, dim, start, stop, sources, target), expr.dim, expr.start, expr.stop)
    if isinstance(expr, Index):
        return Index(narrow(expr.of, dim + 1, start, stop, sources, target), expr.index)
    if isinstance(expr, Mean):
        return Mean(tuple(narrow(part, dim, start, stop, sources, target) for part in expr.parts))
    if isinstance(expr, Stack):
        if dim == 0:
            return Stack(expr.parts[start:stop])
        return Stack(tuple(narrow(part, dim - 1, start, stop, sources, target) for part in expr.parts))
    if isinstance(expr, Concat):
        return _narrow_concat(expr, dim, start, stop, sources, target)
    return Slice(expr, dim, start, stop)


def _narrow_concat(
    expr: Concat, dim: int, start: int, stop: int, sources: Mapping[str, Layout], target: TensorInfo | None
) -> Expr:
    if dim != expr.dim:
        return Concat(tuple(narrow(part, dim, start, stop, sources, target) for part in expr.parts), expr.dim)
    kept = []
    offset = 0
    for part in expr.parts:
        size = infer(part, sources, target).shape[dim]
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            kept.append(narrow(part, dim, low, high, sources, target))
        offset += size
    if not kept:  # an empty slice: keep the shape
        return Slice(expr, dim, start, stop)
    return kept[0] if len(kept) == 1 else Concat(tuple(kept), dim)


def crop(expr: Expr, box: Box, sources: Mapping[str, Layout], target: TensorInfo | None = None) -> Expr:
    """The part of `expr` inside `box`; `expr` is already pushed down."""
    for dim, (start, stop) in enumerate(box):
        expr = narrow(expr, dim, start, stop, sources, target)
    return expr


@dataclass(frozen=True)
class Leaf:
    """A part of one source tensor: its box, and the dimensions that remain (the others are of size 1 and drop out)."""

    take: Take
    box: Box
    kept: tuple[int, ...]


def leaf(expr: Expr, sources: Mapping[str, Layout]) -> Leaf | None:
    """The expression as a part of one source tensor, or None when it is more than that."""
    if isinstance(expr, Take):
        shape = sources[expr.source][expr.name].shape
        return Leaf(expr, full_box(shape), tuple(range(len(shape))))
    if not isinstance(expr, (Slice, Index)):
        return None
    of = leaf(expr.of, sources)
    if of is None:
        return None
    if isinstance(expr, Slice):
        dim, start, stop, kept = of.kept[expr.dim], expr.start, expr.stop, of.kept
    else:
        dim, start, stop, kept = of.kept[0], expr.index, expr.index + 1, of.kept[1:]
    low = of.box[dim][0]
    return Leaf(of.take, (*of.box[:dim], (low + start, low + stop), *of.box[dim + 1 :]), kept)


def takes(expr: Expr) -> set[Take]:
    """Every source tensor that an expression reads."""
    if isinstance(expr, Take):
        return {expr}
    if isinstance(expr, (Slice, Index)):
        return takes(expr.of)
    if isinstance(expr, (Concat, Stack, Mean)):
        return set().union(*(takes(part) for part in expr.parts))
    return set()


def substitute(expr: Expr, source: str, table: Mapping[str, Expr]) -> Expr:
    """Replace every `Take(source, name)` by `table[name]`: the same plan over another naming of the source."""
    if isinstance(expr, Take):
        return table.get(expr.name, expr) if expr.source == source else expr
    if isinstance(expr, Slice):
        return Slice(substitute(expr.of, source, table), expr.dim, expr.start, expr.stop)
    if isinstance(expr, Index):
        return Index(substitute(expr.of, source, table), expr.index)
    if isinstance(expr, Concat):
        return Concat(tuple(substitute(part, source, table) for part in expr.parts), expr.dim)
    if isinstance(expr, (Stack, Mean)):
        return type(expr)(tuple(substitute(part, source, table) for part in expr.parts))
    return expr


def describe(expr: Expr) -> str:
    """One readable line, for tables and errors."""
    if isinstance(expr, Take):
        return f"{expr.source}:{expr.name}"
    if isinstance(expr, Slice):
        return f"{describe(expr.of)}[{':,' * expr.dim}{expr.start}:{expr.stop}]"
    if isinstance(expr, Index):
        return f"{describe(expr.of)}[{expr.index}]"
    if isinstance(expr, Normal):
        return f"normal(std={expr.std:g})"
    if isinstance(expr, Full):
        return f"full({expr.value:g})"
    parts = [describe(part) for part in expr.parts]
    shown = parts if len(parts) <= 6 else [*parts[:2], f"... {len(parts) - 3} more ...", parts[-1]]
    return f"{type(expr).__name__.lower()}({', '.join(shown)})"
