"""What can be said of an expression without reading a tensor: its shape, what it reads, how it is written down."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from btx_nemo.errors import UserError
from btx_nemo.plan.layout import Layout, TensorInfo
from btx_nemo.plan.nodes import (
    FRESH,
    Bernoulli,
    Combine,
    Concat,
    Expr,
    Fresh,
    Full,
    Index,
    Normal,
    Number,
    Slice,
    Splice,
    Stack,
    SwiGLU,
    Take,
    Ties,
    Uniform,
    children,
    rebuild,
)


def generator_for(seed: int, name: str) -> torch.Generator:
    """A generator that depends on (seed, name) alone: order, parallelism and layout cannot change a result."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def bind(expr: Expr, target: str, info: TensorInfo) -> Expr:
    """A target's expression with its name and shape in what is fresh, so that it may become a part of another tensor.

    What is fresh below another kind and has no key and shape of its own gets the target's too.
    """
    if isinstance(expr, Full):
        return replace(expr, info=expr.info or info)
    if isinstance(expr, FRESH):
        return replace(expr, key=expr.key or target, info=expr.info or info)
    return rebuild(expr, [bind(part, target, info) for part in children(expr)])


def infer(expr: Expr, sources: Mapping[str, Layout], target: TensorInfo | None = None) -> TensorInfo:
    """Shape and dtype of an expression; `target` is what fresh tensors without a shape of their own take theirs from.

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
    if isinstance(expr, SwiGLU):
        return _infer_swiglu(expr, [infer(part, sources, target) for part in children(expr)])
    return _infer_parts(expr, [infer(part, sources, target) for part in children(expr)])


def _infer_slice(expr: Slice, of: TensorInfo) -> TensorInfo:
    if not 0 <= expr.dim < len(of.shape) or not 0 <= expr.start <= expr.stop <= of.shape[expr.dim]:
        raise UserError(f"plan: {describe(expr)} is outside of shape {list(of.shape)}")
    shape = (*of.shape[: expr.dim], expr.stop - expr.start, *of.shape[expr.dim + 1 :])
    return TensorInfo(shape, of.dtype)


def _infer_swiglu(expr: SwiGLU, infos: list[TensorInfo]) -> TensorInfo:
    of, w1, w2 = infos
    if any(len(info.shape) != 2 for info in infos) or of.shape[1] != w1.shape[1] or w1.shape[0] != 2 * w2.shape[1]:
        shapes = ", ".join(str(list(info.shape)) for info in infos)
        raise UserError(f"plan: {describe(expr)} has shapes {shapes}, which do not fit together")
    return TensorInfo((of.shape[0], w2.shape[0]), of.dtype)


def _infer_parts(expr: Expr, infos: list[TensorInfo]) -> TensorInfo:
    if not infos:
        raise UserError(f"plan: {describe(expr)} has no parts")
    first = infos[0]
    along = expr.dim if isinstance(expr, Concat) else -1

    def rest(info: TensorInfo) -> list[int]:
        return [size for dim, size in enumerate(info.shape) if dim != along]

    dtype = first.dtype
    for part, info in zip(children(expr), infos, strict=True):
        dtype = _wider(dtype, info.dtype)
        if not dtype or rest(info) != rest(first) or len(info.shape) != len(first.shape):
            raise UserError(
                f"{describe(part)} is {list(info.shape)} {info.dtype} but {describe(children(expr)[0])} is "
                f"{list(first.shape)} {first.dtype}; they must agree"
            )
    if isinstance(expr, Stack):
        return TensorInfo((len(infos), *first.shape), dtype)
    if isinstance(expr, Concat):
        total = sum(info.shape[along] for info in infos)
        return TensorInfo((*first.shape[:along], total, *first.shape[along + 1 :]), dtype)
    return TensorInfo(first.shape, dtype)


def _wider(a: str, b: str) -> str:
    """The dtype that holds both, where they are floating-point; empty for two others that differ."""
    if a == b:
        return a
    both = {a, b} <= {"float16", "bfloat16", "float32", "float64"}
    return str(torch.promote_types(getattr(torch, a), getattr(torch, b))).removeprefix("torch.") if both else ""


def takes(expr: Expr) -> set[Take]:
    """Every source tensor that an expression reads."""
    return {expr} if isinstance(expr, Take) else set().union(*map(takes, children(expr)))


def numbers(expr: Expr) -> set[str]:
    """The names of the statistics that an expression needs."""
    own: tuple[Number, ...] = ()
    if isinstance(expr, Combine):
        own = expr.weights
    elif isinstance(expr, Ties):
        own = (*expr.thresholds, expr.zero_sign)
    return {value for value in own if isinstance(value, str)}.union(*map(numbers, children(expr)))


def substitute(expr: Expr, source: str, table: Mapping[str, Expr]) -> Expr:
    """Replace every `Take(source, name)` by `table[name]`: the same plan over another naming of the source."""
    if isinstance(expr, Take):
        return table.get(expr.name, expr) if expr.source == source else expr
    return rebuild(expr, [substitute(part, source, table) for part in children(expr)])


def describe(expr: Expr) -> str:
    """One readable line, for tables and errors."""
    if isinstance(expr, Take):
        return f"{expr.source}:{expr.name}"
    if isinstance(expr, Slice):
        return f"{describe(expr.of)}[{':,' * expr.dim}{expr.start}:{expr.stop}]"
    if isinstance(expr, Index):
        return f"{describe(expr.of)}[{expr.index}]"
    if isinstance(expr, Splice):
        of, other, some = describe(expr.of), describe(expr.other), expr.choice
        return f"splice({of}, {some.count} of {some.size} along {expr.dim} from {other})"
    if isinstance(expr, FRESH):
        return _describe_fresh(expr)
    parts = [describe(part) for part in children(expr)]
    if isinstance(expr, Combine):
        parts = [f"{_shown(weight)} * {part}" for weight, part in zip(expr.weights, parts, strict=True)]
    shown = parts if len(parts) <= 6 else [*parts[:2], f"... {len(parts) - 3} more ...", parts[-1]]
    return f"{type(expr).__name__.lower()}({', '.join(shown)})"


def _describe_fresh(expr: Fresh) -> str:
    if isinstance(expr, Normal):
        return f"normal(std={expr.std:g})"
    if isinstance(expr, Uniform):
        return f"uniform({expr.limit:g})"
    if isinstance(expr, Bernoulli):
        return f"bernoulli({expr.chance:g})"
    return f"full({expr.value:g})"


def _shown(value: Number) -> str:
    return f"<{value}>" if isinstance(value, str) else f"{value:g}"
