"""Slices moved to the leaves of an expression, so that a part of a target reads only the bytes that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from btx_nemo.plan.layout import Box, Layout, TensorInfo, full_box
from btx_nemo.plan.nodes import (
    ELEMENTWISE,
    FRESH,
    Concat,
    Expr,
    Fresh,
    Index,
    Slice,
    Splice,
    Stack,
    SwiGLU,
    Take,
    children,
    rebuild,
)
from btx_nemo.plan.terms import infer


def push_down(expr: Expr, sources: Mapping[str, Layout], target: TensorInfo | None = None) -> Expr:
    """Move every slice of `expr` to its leaves, so that only needed parts of source tensors are named."""
    if isinstance(expr, Slice):
        return narrow(push_down(expr.of, sources, target), expr.dim, expr.start, expr.stop, sources, target)
    if isinstance(expr, Index):
        return _index(push_down(expr.of, sources, target), expr.index, sources, target)
    return rebuild(expr, [push_down(part, sources, target) for part in children(expr)])


def _index(of: Expr, index: int, sources: Mapping[str, Layout], target: TensorInfo | None) -> Expr:
    def within(part: Expr) -> Expr:
        return _index(part, index, sources, target)

    if isinstance(of, Stack):
        return of.parts[index]
    if isinstance(of, ELEMENTWISE):
        return rebuild(of, [within(part) for part in of.parts])
    if isinstance(of, Concat) and of.dim:
        return Concat(tuple(within(part) for part in of.parts), of.dim - 1)
    if isinstance(of, Splice) and of.dim:
        return Splice(within(of.of), within(of.other), of.dim - 1, of.choice)
    narrowed = narrow(of, 0, index, index + 1, sources, target)
    return _index(narrowed, 0, sources, target) if isinstance(of, Concat) else Index(narrowed, 0)


def narrow(
    expr: Expr, dim: int, start: int, stop: int, sources: Mapping[str, Layout], target: TensorInfo | None = None
) -> Expr:
    """`Slice(expr, dim, start, stop)` with the slice at the leaves; `expr` is already pushed down."""
    shape = infer(expr, sources, target).shape

    def within(part: Expr, dim: int = dim) -> Expr:
        return narrow(part, dim, start, stop, sources, target)

    if (start, stop) == (0, shape[dim]):
        return expr
    if isinstance(expr, Slice):
        if expr.dim == dim:
            return Slice(expr.of, dim, expr.start + start, expr.start + stop)
        return Slice(within(expr.of), expr.dim, expr.start, expr.stop)
    if isinstance(expr, Index):
        return Index(within(expr.of, dim + 1), expr.index)
    if isinstance(expr, ELEMENTWISE):
        return rebuild(expr, [within(part) for part in expr.parts])
    if isinstance(expr, Splice):
        seen = replace(expr.choice, start=expr.choice.start + start) if dim == expr.dim else expr.choice
        return Splice(within(expr.of), within(expr.other), expr.dim, seen)
    if isinstance(expr, Stack):
        return Stack(expr.parts[start:stop] if dim == 0 else tuple(within(part, dim - 1) for part in expr.parts))
    if isinstance(expr, SwiGLU):
        return replace(expr, of=within(expr.of)) if dim == 0 else replace(expr, w2=within(expr.w2, 0))
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
    """A part of one source or fresh tensor: its box, and the dimensions that remain (the others are of size 1)."""

    of: Take | Fresh
    box: Box
    kept: tuple[int, ...]


def leaf(expr: Expr, sources: Mapping[str, Layout], target: TensorInfo | None = None) -> Leaf | None:
    """The expression as a part of one source or fresh tensor, or None when it is more than that."""
    if isinstance(expr, (Take, *FRESH)):
        shape = infer(expr, sources, target).shape
        return Leaf(expr, full_box(shape), tuple(range(len(shape))))
    if not isinstance(expr, (Slice, Index)):
        return None
    of = leaf(expr.of, sources, target)
    if of is None:
        return None
    if isinstance(expr, Slice):
        dim, start, stop, kept = of.kept[expr.dim], expr.start, expr.stop, of.kept
    else:
        dim, start, stop, kept = of.kept[0], expr.index, expr.index + 1, of.kept[1:]
    low = of.box[dim][0]
    return Leaf(of.of, (*of.box[:dim], (low + start, low + stop), *of.box[dim + 1 :]), kept)
