"""Streaming writer of Hugging Face folders: headers first, then every tensor at its fixed place, from any thread."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from btx_nemo.checkpoints.direct import OutputFile
from btx_nemo.checkpoints.reader import byte_view
from btx_nemo.checkpoints.safetensors import INDEX, PRODUCER, SINGLE
from btx_nemo.checkpoints.safetensors_header import NAMES
from btx_nemo.errors import UserError
from btx_nemo.plan.execute import BLOCK_BYTES
from btx_nemo.plan.layout import ITEMSIZE, PAGE, Box, TensorInfo, row_blocks
from btx_nemo.plan.plan import Job

MAX_SHARDS = 800
"""All shards are open at once: fewer than the usual limit of 1024 open files."""
RUN_BLOCKS = 8
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
        self._outputs: list[OutputFile] = []
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
        # Wide dtypes first, as the format's own writer has it: every tensor is then aligned to its element. Among them
        # whole pages first: every large tensor then begins on a page.
        names = sorted(
            names, key=lambda name: (-ITEMSIZE[self.targets[name].dtype], self.targets[name].nbytes % PAGE > 0)
        )
        header: dict[str, object] = {"__metadata__": self._metadata}
        position = 0
        for name in names:
            info = self.targets[name]
            end = position + info.nbytes
            header[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [position, end]}
            position = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-(8 + len(raw)) % PAGE)
        start = 8 + len(raw)
        number = len(self._outputs)
        self._outputs.append(OutputFile(self.folder / file, start + position))
        self._outputs[number].write(memoryview(struct.pack("<Q", len(raw)) + raw), 0)
        for name in names:
            self._place[name] = (number, start)
            start += self.targets[name].nbytes

    def work(self, jobs: tuple[Job, ...]) -> list[list[tuple[Job, Box]]]:
        """Lists of consecutive blocks."""
        lists = []
        for job in jobs:
            boxes = [(job, box) for box in row_blocks(job.info, BLOCK_BYTES)]
            lists += [boxes[i : i + RUN_BLOCKS] for i in range(0, len(boxes), RUN_BLOCKS)]
        return lists

    def offset(self, target: str, box: Box) -> int:
        """The byte of its file where a part begins."""
        info = self.targets[target]
        item = ITEMSIZE[info.dtype]
        return self._place[target][1] + item * sum(low * prod(info.shape[d + 1 :]) for d, (low, _) in enumerate(box))

    def write(self, target: str, box: Box, tensor: torch.Tensor) -> None:
        """Write one contiguous part at its place."""
        self._outputs[self._place[target][0]].write(byte_view(tensor), self.offset(target, box))

    def close(self) -> None:
        """Make the data durable, write the index, close the files."""
        for output in self._outputs:
            output.sync()
        self.abort()
        if len(self.files) > 1:
            weight_map = {name: self.files[number] for name, (number, _) in self._place.items()}
            total = sum(info.nbytes for info in self.targets.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def abort(self) -> None:
        """Close the files; what they hold is worth nothing."""
        while self._outputs:
            self._outputs.pop().close()


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
