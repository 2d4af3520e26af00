"""The kinds of tensor expressions: what a target tensor is made of, with no tensor read.

Fresh tensors draw their values by (seed, key); numbers that come from the values of tensors are named (`Number`) and
put in by `plan.statistics` before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from btx_nemo.plan.layout import TensorInfo

Number: TypeAlias = "float | str"
"""A number, or the name of a statistic of the plan."""


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


@dataclass(frozen=True)
class Uniform:
    """Fresh weights, uniform in [-limit, limit), seeded by (seed, key)."""

    limit: float
    key: str = ""
    info: TensorInfo | None = None


@dataclass(frozen=True)
class Bernoulli:
    """Ones with probability `chance`, else zeros, seeded by (seed, key)."""

    chance: float
    key: str = ""
    info: TensorInfo | None = None


@dataclass(frozen=True)
class Combine:
    """The weighted sum of the parts, accumulated in fp32 in their order."""

    parts: tuple[Expr, ...]
    weights: tuple[Number, ...]


@dataclass(frozen=True)
class Product:
    """The product of the parts, element by element, in fp32."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Choice:
    """`count` of `size` indices, drawn by (seed, key), as seen from index `start` on."""

    key: str
    count: int
    size: int
    start: int = 0


@dataclass(frozen=True)
class Splice:
    """`of`, but with the chosen entries along `dim` from `other`."""

    of: Expr
    other: Expr
    dim: int
    choice: Choice


@dataclass(frozen=True)
class Ties:
    """TIES-Merging (Yadav et al., 2023) of the parts, of which the first is the base.

    Each difference from the base is trimmed where its magnitude is below its threshold; the sum's sign is elected
    (`zero_sign` where the sum is zero); differences of that sign are averaged; the base plus `scale` times the mean.
    """

    parts: tuple[Expr, ...]
    thresholds: tuple[Number, ...]
    scale: float
    zero_sign: Number = 1.0


@dataclass(frozen=True)
class SwiGLU:
    """w2 (silu(first) * second) of every row of `of` [N, D], the halves of w1 row; computed in fp64; [N, H]."""

    of: Expr
    w1: Expr
    """[2 h, D]."""
    w2: Expr
    """[H, h]."""


Fresh: TypeAlias = Normal | Uniform | Bernoulli | Full
Elementwise: TypeAlias = Mean | Combine | Product | Ties
Expr: TypeAlias = Take | Slice | Index | Concat | Stack | Splice | SwiGLU | Elementwise | Fresh
FRESH = (Normal, Uniform, Bernoulli, Full)
ELEMENTWISE = (Mean, Combine, Product, Ties)
"""Kinds whose every element depends on the same element of each part."""


def children(expr: Expr) -> tuple[Expr, ...]:
    """The expressions that an expression is made of."""
    if isinstance(expr, (Slice, Index)):
        return (expr.of,)
    if isinstance(expr, Splice):
        return (expr.of, expr.other)
    if isinstance(expr, SwiGLU):
        return (expr.of, expr.w1, expr.w2)
    return () if isinstance(expr, (Take, *FRESH)) else expr.parts


def rebuild(expr: Expr, parts: Sequence[Expr]) -> Expr:
    """The same kind of expression, made of `parts` instead of its `children`."""
    if isinstance(expr, (Take, *FRESH)):
        return expr
    if isinstance(expr, (Slice, Index)):
        return replace(expr, of=parts[0])
    if isinstance(expr, Splice):
        return replace(expr, of=parts[0], other=parts[1])
    if isinstance(expr, SwiGLU):
        return SwiGLU(*parts)
    return replace(expr, parts=tuple(parts))
