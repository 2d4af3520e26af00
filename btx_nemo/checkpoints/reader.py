"""What every checkpoint reader offers, and the reading of tensor bytes from a place in a file."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from btx_nemo.checkpoints.direct import PastCache
from btx_nemo.errors import UserError
from btx_nemo.plan.layout import Box, Layout, full_box

MIN_RUN_BYTES = 16 << 10
"""Pieces of a row shorter than this are read together with what lies between them, then picked in memory."""


class Reader(ABC):
    """A checkpoint, read lazily: the layout first, then parts of tensors."""

    once = False
    """Whether its tensors are read once, by one process: then their bytes need not stay in the page cache."""

    @abstractmethod
    def layout(self) -> Layout:
        """Names, shapes and dtypes; reads no tensor."""

    @abstractmethod
    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read the part `box` into `out`: contiguous, of the box's shape and the tensor's dtype."""

    @abstractmethod
    def where(self, name: str) -> str:
        """The file that holds the tensor (or its first part), for errors."""

    def read(self, name: str, slices: Sequence[slice] | None = None) -> torch.Tensor:
        """A tensor, or the part given by one slice per leading dimension (step 1; the rest is taken whole).

        Raises UserError when there is no such tensor.
        """
        layout = self.layout()
        if name not in layout:
            raise UserError(f"no tensor {name!r} in this checkpoint; it has {len(layout)} others")
        info = layout[name]
        box = list(full_box(info.shape))
        for dim, part in enumerate(slices or ()):
            start, stop, step = part.indices(info.shape[dim])
            if step != 1:
                raise ValueError(f"slices must have step 1, not {step}")
            box[dim] = (start, max(start, stop))
        out = torch.empty([stop - start for start, stop in box], dtype=getattr(torch, info.dtype))
        if out.numel():
            self.read_into(name, tuple(box), out)
        return out


def pread_exactly(fd: int | PastCache, offset: int, out: memoryview, path: str, name: str) -> None:
    """Fill `out` from `offset`; UserError when the file ends before."""
    done = 0
    while done < len(out):
        try:
            rest = out[done:]
            count = os.preadv(fd, [rest], offset + done) if isinstance(fd, int) else fd.read(rest, offset + done)
        except OSError as error:
            raise UserError(
                f"{path}: tensor {name!r}: cannot be read ({error.strerror}); copy the file again"
            ) from None
        if count == 0:
            raise UserError(f"{path}: tensor {name!r}: file ends early (it changed or was cut); copy it again")
        done += count


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, shared."""
    flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
    raw: Any = flat.view(torch.uint8).numpy().reshape(-1)
    return memoryview(raw)


def read_box(
    fd: int | PastCache, start: int, shape: tuple[int, ...], box: Box, out: torch.Tensor, path: str, name: str
) -> None:
    """Read the part `box` of a row-major tensor of `shape` that begins at byte `start` of a file into `out`."""
    item = out.element_size()
    strides = [prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
    # From `split` on, the part is one contiguous run; the dimensions before it are walked.
    split = max(len(shape) - 1, 0)
    while split > 0 and box[split] == (0, shape[split]):
        split -= 1
    run = prod(high - low for low, high in box[split:]) * item
    memory = byte_view(out)
    if len(memory) == 0:
        return
    if run < MIN_RUN_BYTES and run < len(memory):
        _read_covering(fd, start, shape, box, out, path, name)
        return

    def walk(dim: int, offset: int, done: int) -> int:
        if dim == split:
            begin = offset + (box[dim][0] * strides[dim] if dim < len(shape) else 0)
            pread_exactly(fd, begin, memory[done : done + run], path, name)
            return done + run
        for i in range(*box[dim]):
            done = walk(dim + 1, offset + i * strides[dim], done)
        return done

    walk(0, start, 0)


def _read_covering(
    fd: int | PastCache, start: int, shape: tuple[int, ...], box: Box, out: torch.Tensor, path: str, name: str
) -> None:
    """Read whole rows of the last cut dimension, then pick: for many short runs."""
    outer = max(dim for dim in range(len(shape)) if box[dim] != (0, shape[dim])) - 1
    wide = (*box[: outer + 1], *((0, size) for size in shape[outer + 1 :]))
    rows = torch.empty([high - low for low, high in wide], dtype=out.dtype)
    read_box(fd, start, shape, wide, rows, path, name)
    picked = tuple(slice(None) if dim <= outer else slice(*box[dim]) for dim in range(len(shape)))
    out.copy_(rows[picked])
