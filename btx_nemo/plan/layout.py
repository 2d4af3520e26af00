"""What is known of tensors before any of them is read: shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype the project reads or writes; names are torch's."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype (torch's name, without `torch.`) of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * ITEMSIZE[self.dtype]


PAGE = 4096
"""Bytes in whose multiples memory and files agree where data goes straight to a disk."""

Layout = Mapping[str, TensorInfo]
"""Tensor name -> what it is."""

Box = tuple[tuple[int, int], ...]
"""A rectangular part of a tensor: (start, stop) per dimension."""


def full_box(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, size) for size in shape)


def row_blocks(info: TensorInfo, limit: int) -> list[Box]:
    """Cut a tensor into boxes of at most `limit` bytes, each contiguous in row-major order, in that order.

    Leading dimensions are cut first; a last dimension longer than `limit` is cut as well.
    """
    if not info.shape:
        return [()]
    if info.numel == 0:
        return []
    item = ITEMSIZE[info.dtype]
    boxes: list[Box] = []

    def cut(prefix: Box, dims: tuple[int, ...]) -> None:
        inner = prod(dims[1:]) * item
        if inner > limit and len(dims) > 1:
            for i in range(dims[0]):
                cut((*prefix, (i, i + 1)), dims[1:])
            return
        step = max(1, limit // inner)
        for start in range(0, dims[0], step):
            boxes.append((*prefix, (start, min(start + step, dims[0])), *((0, d) for d in dims[1:])))

    cut((), info.shape)
    return boxes
