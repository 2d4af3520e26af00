"""Evaluating expressions: values of parts of targets, reading only the bytes that they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Protocol

import torch

from btx_nemo.plan.expr import (
    ELEMENTWISE,
    Combine,
    Concat,
    Expr,
    Full,
    Index,
    Leaf,
    Mean,
    Product,
    Slice,
    Splice,
    Stack,
    SwiGLU,
    Take,
    Ties,
    children,
    crop,
    infer,
    leaf,
    push_down,
)
from btx_nemo.plan.finite import check_finite, check_result, may_overflow
from btx_nemo.plan.fresh import Drawer, chosen
from btx_nemo.plan.layout import PAGE, Box, Layout, TensorInfo, full_box


class TensorReader(Protocol):
    """What execution needs of a source."""

    def layout(self) -> Layout:
        """Names, shapes and dtypes, without reading a tensor."""

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read the part `box` of a tensor into `out`, contiguous, of the box's shape and the tensor's dtype."""

    def where(self, name: str) -> str:
        """The file that holds the tensor, for errors."""


class Scratch:
    """Blocks of memory that a thread uses again and again, one per nesting depth."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._depth = 0

    @contextmanager
    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Iterator[torch.Tensor]:
        """An uninitialised tensor, valid inside the context; its address agrees with `offset` modulo a page."""
        nbytes = prod(shape) * dtype.itemsize
        if self._depth == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[self._depth].numel() < nbytes + PAGE:
            self._buffers[self._depth] = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        buffer = self._buffers[self._depth]
        start = (offset - buffer.data_ptr()) % PAGE
        self._depth += 1
        try:
            yield buffer[start : start + nbytes].view(dtype).view(shape)
        finally:
            self._depth -= 1


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`."""
    return getattr(torch, name)


class Evaluator:
    """Evaluates expressions into given memory; one per thread."""

    def __init__(self, readers: Mapping[str, TensorReader], sources: Mapping[str, Layout], seed: int) -> None:
        self.readers = readers
        self.sources = sources
        self.seed = seed
        self.scratch = Scratch()
        self.drawer = Drawer(seed)

    def into(self, expr: Expr, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        """Write the value of `expr` (pushed down) into `out`, casting to its dtype. `info` is the whole target's."""
        part = leaf(expr, self.sources, info)
        if part is not None:
            self._leaf(part, out, info, target)
        elif isinstance(expr, Concat):
            start = 0
            for piece in expr.parts:
                size = infer(piece, self.sources, info).shape[expr.dim]
                self.into(piece, out.narrow(expr.dim, start, size), info, target)
                start += size
        elif isinstance(expr, Stack):
            for i, piece in enumerate(expr.parts):
                self.into(piece, out[i], info, target)
        elif isinstance(expr, Ties):
            self._ties(expr, out, info, target)
        elif isinstance(expr, ELEMENTWISE):
            self._accumulate(expr, out, info, target)
        elif isinstance(expr, Splice):
            self._splice(expr, out, info, target)
        elif isinstance(expr, SwiGLU):
            of, w1, w2 = (self._wide(part, info, target) for part in children(expr))
            first, second = (of @ w1.T).chunk(2, dim=-1)
            out.copy_((torch.nn.functional.silu(first) * second) @ w2.T)
        elif isinstance(expr, (Slice, Index)):
            inner = infer(expr.of, self.sources, info)
            with self.scratch.tensor(inner.shape, out.dtype) as whole:
                self.into(expr.of, whole, info, target)
                out.copy_(whole[expr.index] if isinstance(expr, Index) else _narrowed(whole, expr))

    def _wide(self, expr: Expr, info: TensorInfo, target: str) -> torch.Tensor:
        """The value in fp64."""
        value = torch.empty(infer(expr, self.sources, info).shape, dtype=torch.float64)
        self.into(expr, value, info, target)
        return value

    def _leaf(self, part: Leaf, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        shape = tuple(stop - start for start, stop in part.box)
        if not isinstance(part.of, Take):
            whole_info = infer(part.of, self.sources, info)
            key = target if isinstance(part.of, Full) else part.of.key or target
            self.drawer.fill(part.of, key, whole_info, part.box, out.view(shape))
            return
        dtype = torch_dtype(self.sources[part.of.source][part.of.name].dtype)
        if out.dtype == dtype and out.is_contiguous():
            self._read(part.of, part.box, out.view(shape))
            return
        with self.scratch.tensor(shape, dtype) as whole:
            self._read(part.of, part.box, whole)
            out.copy_(whole.view(out.shape))

    def _read(self, take: Take, box: Box, out: torch.Tensor) -> None:
        reader = self.readers[take.source]
        reader.read_into(take.name, box, out)
        check_finite(out, box, take.name, reader.where(take.name))

    def _accumulate(self, expr: Mean | Combine | Product, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        inner = infer(expr, self.sources, info)
        weights = expr.weights if isinstance(expr, Combine) else (1.0,) * len(expr.parts)
        wide = torch.float64 if inner.dtype == "float64" else torch.float32
        with self.scratch.tensor(inner.shape, wide) as total, self.scratch.tensor(inner.shape, wide) as part:
            self.into(expr.parts[0], total, info, target)
            if weights[0] != 1:
                total.mul_(float(weights[0]))
            for piece, weight in zip(expr.parts[1:], weights[1:], strict=True):
                self.into(piece, part, info, target)
                if isinstance(expr, Product):
                    total.mul_(part)
                else:
                    total.add_(part, alpha=float(weight))
            if isinstance(expr, Mean):
                # Divide, not multiply by 1/n: the mean of equal values is then that value wherever their sum is exact.
                total.div_(len(expr.parts))
            out.copy_(total)

    def _splice(self, expr: Splice, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        self.into(expr.of, out, info, target)
        indices = chosen(self.seed, expr.choice, out.shape[expr.dim])
        if not len(indices):
            return
        with self.scratch.tensor(tuple(out.shape), out.dtype) as other:
            self.into(expr.other, other, info, target)
            out.index_copy_(expr.dim, indices, other.index_select(expr.dim, indices))

    def _ties(self, expr: Ties, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        inner = infer(expr, self.sources, info)
        wide = torch.float64 if inner.dtype == "float64" else torch.float32
        with self.scratch.tensor((len(expr.parts), *inner.shape), wide) as parts:
            for piece, part in zip(expr.parts, parts, strict=True):
                self.into(piece, part, info, target)
            base, differences = parts[0], parts[1:]
            sign = trim(base, differences, expr)
            sign[sign == 0] = float(expr.zero_sign)
            agreeing = differences.mul_(differences.sign() == sign)  # a difference of zero agrees with no sign
            count = agreeing.count_nonzero(dim=0).clamp_(min=1)
            out.copy_(base.add_(agreeing.sum(dim=0).div_(count), alpha=expr.scale))


def trim(base: torch.Tensor, parts: torch.Tensor, expr: Ties) -> torch.Tensor:
    """Makes `parts` [n, ...] their differences from the base, trimmed; returns the sign of their sum."""
    for part, threshold in zip(parts, expr.thresholds, strict=True):
        part.sub_(base)
        part.mul_(part.abs() >= float(threshold))
    return parts.sum(dim=0).sign_()


def _narrowed(tensor: torch.Tensor, expr: Slice) -> torch.Tensor:
    return tensor.narrow(expr.dim, expr.start, expr.stop - expr.start)


def evaluate(
    expr: Expr, readers: Mapping[str, TensorReader], info: TensorInfo, target: str, seed: int, box: Box | None = None
) -> torch.Tensor:
    """The value of an expression as a tensor of dtype `info.dtype`: all of the target, or its part `box`.

    `info` is the whole target's shape and dtype. Reads only the bytes that the part needs.
    """
    sources = {name: reader.layout() for name, reader in readers.items()}
    box = full_box(info.shape) if box is None else box
    part = crop(push_down(expr, sources, info), box, sources, info)
    out = torch.empty([stop - start for start, stop in box], dtype=torch_dtype(info.dtype))
    Evaluator(readers, sources, seed).into(part, out, info, target)
    if may_overflow(expr, sources, info):
        check_result(out, target, tuple(low for low, _ in box))
    return out
