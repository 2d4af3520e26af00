"""Streaming writer of Hugging Face folders: headers first, then every tensor at its fixed place, from any thread."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from btx_nemo.checkpoints.reader import byte_view
from btx_nemo.checkpoints.safetensors import INDEX, SINGLE
from btx_nemo.checkpoints.safetensors_header import NAMES
from btx_nemo.errors import UserError
from btx_nemo.plan.execute import BLOCK_BYTES
from btx_nemo.plan.expr import FRESH
from btx_nemo.plan.layout import ITEMSIZE, Box, TensorInfo, row_blocks
from btx_nemo.plan.plan import Job

PRODUCER = "btx_nemo"
"""Value of the header's metadata key `producer`: marks a file that a manifest belongs to."""
ALIGNMENT = 64
MAX_SHARDS = 800
"""All shards are open at once: fewer than the usual limit of 1024 open files."""
RUN_BLOCKS = 64
"""Blocks that one worker writes in a row."""


class SafetensorsSink:
    """Writes `targets` into `folder` as shards of at most `shard_size` bytes (a larger tensor has its own shard)."""

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, TensorInfo],
        shard_size: int = 5 << 30,
        producer: str | None = PRODUCER,
    ) -> None:
        self.folder = folder
        self.targets = dict(targets)
        self._metadata = {"format": "pt"} | ({"producer": producer} if producer else {})
        self._place: dict[str, tuple[int, int]] = {}
        self._fds: list[int] = []
        shards = _split(self.targets, shard_size)
        if len(shards) > MAX_SHARDS:
            raise UserError(f"shard_size={shard_size} makes {len(shards)} shards; choose a larger one")
        self.files = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
        try:
            for file, names in zip(self.files, shards, strict=True):
                self._create(file, names)
        except BaseException:
            self.abort()
            raise

    def _create(self, file: str, names: list[str]) -> None:
        # Wide dtypes first, as the format's own writer has it: every tensor is then aligned to its element.
        names = sorted(names, key=lambda name: -ITEMSIZE[self.targets[name].dtype])
        header: dict[str, object] = {"__metadata__": self._metadata}
        position = 0
        for name in names:
            info = self.targets[name]
            end = position + info.nbytes
            header[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [position, end]}
            position = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
        fd = os.open(self.folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        number = len(self._fds)
        self._fds.append(fd)
        self._pwrite(fd, memoryview(struct.pack("<Q", len(raw)) + raw), 0)
        os.ftruncate(fd, 8 + len(raw) + position)
        start = 8 + len(raw)
        for name in names:
            self._place[name] = (number, start)
            start += self.targets[name].nbytes

    def work(self, jobs: tuple[Job, ...]) -> list[list[tuple[Job, Box]]]:
        """Lists of consecutive blocks; a fresh tensor is one list, so that it is made once."""
        lists = []
        for job in jobs:
            boxes = [(job, box) for box in row_blocks(job.info, BLOCK_BYTES)]
            run = max(1, len(boxes) if isinstance(job.expr, FRESH) else RUN_BLOCKS)
            lists += [boxes[i : i + run] for i in range(0, len(boxes), run)]
        return lists

    def write(self, target: str, box: Box, tensor: torch.Tensor) -> None:
        """Write one contiguous part at its place."""
        info = self.targets[target]
        number, start = self._place[target]
        item = ITEMSIZE[info.dtype]
        offset = sum(low * prod(info.shape[dim + 1 :]) for dim, (low, _) in enumerate(box)) * item
        self._pwrite(self._fds[number], byte_view(tensor), start + offset)

    @staticmethod
    def _pwrite(fd: int, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def close(self) -> None:
        """Make the data durable, write the index, close the files."""
        for fd in self._fds:
            os.fsync(fd)
        self.abort()
        if len(self.files) > 1:
            weight_map = {name: self.files[number] for name, (number, _) in self._place.items()}
            total = sum(info.nbytes for info in self.targets.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def abort(self) -> None:
        """Close the files; what they hold is worth nothing."""
        while self._fds:
            os.close(self._fds.pop())


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _split(targets: Mapping[str, TensorInfo], shard_size: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in targets.items():
        if shards[-1] and size + info.nbytes > shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return shards
