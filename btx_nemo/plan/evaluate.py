"""Evaluating expressions: values of parts of targets, reading only the bytes that they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Protocol

import torch

from btx_nemo.plan.expr import (
    FRESH,
    Concat,
    Expr,
    Full,
    Index,
    Leaf,
    Mean,
    Normal,
    Slice,
    Stack,
    crop,
    generator_for,
    infer,
    leaf,
    push_down,
)
from btx_nemo.plan.finite import check_finite, check_result, may_overflow
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

    def into(self, expr: Expr, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        """Write the value of `expr` (pushed down) into `out`, casting to its dtype. `info` is the whole target's."""
        part = leaf(expr, self.sources)
        if part is not None:
            self._read(part, out)
        elif isinstance(expr, Concat):
            start = 0
            for piece in expr.parts:
                size = infer(piece, self.sources, info).shape[expr.dim]
                self.into(piece, out.narrow(expr.dim, start, size), info, target)
                start += size
        elif isinstance(expr, Stack):
            for i, piece in enumerate(expr.parts):
                self.into(piece, out[i], info, target)
        elif isinstance(expr, Mean):
            self._mean(expr, out, info, target)
        elif isinstance(expr, FRESH):
            self._fresh(expr, out, target)
        elif isinstance(expr, (Slice, Index)):
            inner = infer(expr.of, self.sources, info)
            with self.scratch.tensor(inner.shape, torch_dtype(inner.dtype)) as whole:
                self.into(expr.of, whole, info, target)
                picked = whole[expr.index] if isinstance(expr, Index) else _narrowed(whole, expr)
                out.copy_(picked)

    def _read(self, part: Leaf, out: torch.Tensor) -> None:
        take = part.take
        reader = self.readers[take.source]
        shape = tuple(stop - start for start, stop in part.box)
        dtype = torch_dtype(self.sources[take.source][take.name].dtype)
        if out.dtype == dtype and out.is_contiguous():
            whole = out.view(shape)
            reader.read_into(take.name, part.box, whole)
            check_finite(whole, part.box, take.name, reader.where(take.name))
            return
        with self.scratch.tensor(shape, dtype) as whole:
            reader.read_into(take.name, part.box, whole)
            check_finite(whole, part.box, take.name, reader.where(take.name))
            out.copy_(whole.view(out.shape))

    def _mean(self, expr: Mean, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        inner = infer(expr, self.sources, info)
        wide = torch.float64 if inner.dtype == "float64" else torch.float32
        with self.scratch.tensor(inner.shape, wide) as total, self.scratch.tensor(inner.shape, wide) as part:
            self.into(expr.parts[0], total, info, target)
            for piece in expr.parts[1:]:
                self.into(piece, part, info, target)
                total.add_(part)
            # Divide, not multiply by 1/n: the mean of equal values is then that value wherever their sum is exact.
            out.copy_(total.div_(len(expr.parts)))

    def _fresh(self, expr: Normal | Full, out: torch.Tensor, target: str) -> None:
        if isinstance(expr, Full):
            out.fill_(expr.value)
            return
        values = torch.empty(out.shape, dtype=torch.float32)
        generator = generator_for(self.seed, target)
        if expr.cut:
            limit = expr.cut * expr.std
            torch.nn.init.trunc_normal_(values, 0.0, expr.std, -limit, limit, generator=generator)
        else:
            values.normal_(0.0, expr.std, generator=generator)
        out.copy_(values)


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
