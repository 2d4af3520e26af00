"""Values that are drawn: by (seed, key) alone, in chunks, so that a part of a tensor draws little more than itself."""

from __future__ import annotations

import functools
from collections import OrderedDict
from math import prod

import torch

from btx_nemo.plan.expr import Bernoulli, Choice, Fresh, Full, Normal, Uniform, generator_for
from btx_nemo.plan.layout import Box, TensorInfo

CHUNK = 1 << 20
"""Elements of a tensor, in row-major order, that are drawn at once; the n-th chunk has a seed of its own.

A result that is documented depends on it: do not change it.
"""
KEPT_CHUNKS = 2


class Drawer:
    """Fills memory with parts of fresh tensors; keeps the chunks drawn last. One per thread."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._chunks: OrderedDict[object, torch.Tensor] = OrderedDict()

    def fill(self, expr: Fresh, key: str, info: TensorInfo, box: Box, out: torch.Tensor) -> None:
        """Write the part `box` of the tensor `expr`, of `info`'s shape, into `out`, which has the box's shape."""
        if isinstance(expr, Full):
            out.fill_(expr.value)
        elif out.numel():
            shape, box = info.shape or (1,), box or ((0, 1),)
            self._fill(expr, key, info.numel, shape, box, out if info.shape else out.view(1), 0)

    def _fill(
        self, expr: Fresh, key: str, total: int, shape: tuple[int, ...], box: Box, out: torch.Tensor, offset: int
    ) -> None:
        inner, (start, stop) = prod(shape[1:]), box[0]
        if len(shape) > 1 and inner > CHUNK:
            for i in range(start, stop):
                self._fill(expr, key, total, shape[1:], box[1:], out[i - start], offset + i * inner)
            return
        step = max(1, CHUNK // inner)
        rest = (slice(None), *(slice(low, high) for low, high in box[1:]))
        for low in range(start, stop, step):
            high = min(low + step, stop)
            rows = self._flat(expr, key, total, offset + low * inner, offset + high * inner)
            out[low - start : high - start] = rows.view(high - low, *shape[1:])[rest]

    def _flat(self, expr: Fresh, key: str, total: int, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor of `total` elements."""
        pieces = []
        for chunk in range(start // CHUNK, (stop - 1) // CHUNK + 1):
            first = chunk * CHUNK
            values = self._chunk(expr, key, chunk, min(CHUNK, total - first))
            pieces.append(values[max(start - first, 0) : stop - first])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _chunk(self, expr: Fresh, key: str, chunk: int, size: int) -> torch.Tensor:
        name = (expr, key, chunk, size)
        if name not in self._chunks:
            self._chunks[name] = _draw(expr, generator_for(self.seed, f"{key}#{chunk}" if chunk else key), size)
            if len(self._chunks) > KEPT_CHUNKS:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(name)
        return self._chunks[name]


def _draw(expr: Fresh, generator: torch.Generator, size: int) -> torch.Tensor:
    values = torch.empty(size, dtype=torch.float32)
    if isinstance(expr, Normal) and expr.cut:
        limit = expr.cut * expr.std
        return torch.nn.init.trunc_normal_(values, 0.0, expr.std, -limit, limit, generator=generator)
    if isinstance(expr, Normal):
        return values.normal_(0.0, expr.std, generator=generator)
    if isinstance(expr, Uniform):
        return values.uniform_(-expr.limit, expr.limit, generator=generator)
    assert isinstance(expr, Bernoulli)
    return values.bernoulli_(expr.chance, generator=generator)


@functools.lru_cache(maxsize=64)
def _chosen(seed: int, key: str, count: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=generator_for(seed, key))[:count].sort().values


def chosen(seed: int, choice: Choice, length: int) -> torch.Tensor:
    """The chosen indices among the `length` that begin at the choice's start, counted from there; int64, ascending."""
    whole = _chosen(seed, choice.key, choice.count, choice.size)
    return whole[(whole >= choice.start) & (whole < choice.start + length)] - choice.start
