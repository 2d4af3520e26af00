"""Sources and sinks in memory, and small helpers for tests of plans and checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from btx_nemo.checkpoints.reader import Reader
from btx_nemo.plan.layout import Box, Layout, TensorInfo, row_blocks
from btx_nemo.plan.plan import Job


def info_of(tensor: torch.Tensor) -> TensorInfo:
    """Shape and dtype of a tensor."""
    return TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class MemoryReader(Reader):
    """Tensors in memory; counts the elements that are read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.elements_read = 0
        self._lock = threading.Lock()

    def layout(self) -> Layout:
        return {name: info_of(tensor) for name, tensor in self.tensors.items()}

    def where(self, name: str) -> str:
        return "memory"

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name][tuple(slice(low, high) for low, high in box)])
        with self._lock:
            self.elements_read += out.numel()


class MemorySink:
    """Collects what a plan writes, in blocks of a chosen size."""

    def __init__(self, block_bytes: int = 64) -> None:
        self.block_bytes = block_bytes
        self.tensors: dict[str, torch.Tensor] = {}
        self.written: list[tuple[str, Box]] = []

    def work(self, jobs: tuple[Job, ...]) -> list[list[tuple[Job, Box]]]:
        for job in jobs:
            self.tensors[job.target] = torch.zeros(job.info.shape, dtype=getattr(torch, job.info.dtype))
        return [[(job, box)] for job in jobs for box in row_blocks(job.info, self.block_bytes)]

    def offset(self, target: str, box: Box) -> int:
        return 0

    def write(self, target: str, box: Box, tensor: torch.Tensor) -> None:
        self.tensors[target][tuple(slice(low, high) for low, high in box)] = tensor
        self.written.append((target, box))


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, through the safetensors library."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(bits(a[k]), bits(b[k])) for k in a
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def temporaries(folder: Path) -> list[str]:
    """Names in a folder that a failed command would have left behind."""
    return sorted(path.name for path in folder.iterdir() if ".tmp-" in path.name or path.name.endswith(".partial"))
