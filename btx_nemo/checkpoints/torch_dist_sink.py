"""Writing Megatron's torch_dist checkpoints without Megatron, past the page cache, from any number of threads."""

from __future__ import annotations

import bisect
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from btx_nemo.checkpoints.direct import OutputFile
from btx_nemo.checkpoints.dist_format import METADATA
from btx_nemo.checkpoints.reader import byte_view
from btx_nemo.checkpoints.respelled import SPELLINGS
from btx_nemo.checkpoints.torch_archive import Archive, archive_of, checksum_of
from btx_nemo.plan.execute import BLOCK_BYTES
from btx_nemo.plan.layout import ITEMSIZE, PAGE, Box, TensorInfo, row_blocks
from btx_nemo.plan.plan import Job


@dataclass
class PlacedChunk:
    """A chunk that is to be written: its archive, and where in which file."""

    box: Box
    archive: Archive
    blocks: list[Box]
    """Its parts in order, each at most one block of an execution."""
    strides: tuple[int, ...]
    """Bytes from one entry of the chunk to the next, by dimension."""
    file: str = ""
    start: int = 0
    checksum: int = 0
    """Of the blocks that are written."""

    @staticmethod
    def of(box: Box, info: TensorInfo) -> PlacedChunk:
        """The chunk `box` of a tensor."""
        shape = tuple(high - low for low, high in box)
        blocks = [
            tuple((low + base, high + base) for (low, high), (base, _) in zip(block, box, strict=True))
            for block in row_blocks(TensorInfo(shape, info.dtype), BLOCK_BYTES)
        ]
        strides = tuple(ITEMSIZE[info.dtype] * prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return PlacedChunk(box, archive_of(shape, info.dtype), blocks, strides)

    def place(self, file: str, end: int) -> int:
        """Put it behind byte `end` of a file, its elements on a page; returns where it ends."""
        self.file, self.start = file, end + (-(end + len(self.archive.head)) % PAGE)
        return self.start + self.archive.length

    def offset(self, block: Box) -> int:
        """The byte of the file where a block begins."""
        inside = (low - base for (low, _), (base, _) in zip(block, self.box, strict=True))
        first = sum(stride * index for stride, index in zip(self.strides, inside, strict=True))
        return self.start + len(self.archive.head) + first


class DistSink:
    """Writes a torch_dist checkpoint that `megatron.core.dist_checkpointing.load` reads (0.16 to 0.19).

    Tensors are stored as chunks of at most `chunk_bytes`, each a `torch.save` archive, spread over `files` files. The
    place of each is known beforehand and does not depend on the number of workers, each of which writes whole chunks.
    Megatron is told how keys are spelled (`dist_checkpointing.load_content_metadata`).
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, TensorInfo],
        *,
        files: int = 8,
        chunk_bytes: int = 16 << 20,
        spelling: str = "stacked",
    ) -> None:
        self.folder = folder
        self.targets = dict(targets)
        self.content = SPELLINGS[spelling]
        self._chunks = {
            name: [PlacedChunk.of(box, info) for box in row_blocks(info, chunk_bytes)]
            for name, info in self.targets.items()
        }
        self._outputs: dict[str, OutputFile] = {}
        sizes: dict[str, int] = {}
        for name, file in sorted(_spread(self.targets, files).items()):
            for chunk in self._chunks[name]:
                sizes[file] = chunk.place(file, sizes.get(file, 0))
        try:
            for file, size in sizes.items():
                self._outputs[file] = OutputFile(folder / file, size)
        except BaseException:
            self.abort()
            raise

    def work(self, jobs: tuple[Job, ...]) -> list[list[tuple[Job, Box]]]:
        """One list per chunk, its blocks in order."""
        return [[(job, block) for block in chunk.blocks] for job in jobs for chunk in self._chunks[job.target]]

    def offset(self, target: str, box: Box) -> int:
        """The byte of its file where a block begins."""
        return self._chunk(target, box).offset(box)

    def _chunk(self, target: str, block: Box) -> PlacedChunk:
        chunks = self._chunks[target]  # in order, each contiguous
        return chunks[bisect.bisect_right(chunks, _origin(block), key=lambda chunk: _origin(chunk.box)) - 1]

    def write(self, target: str, box: Box, tensor: torch.Tensor) -> None:
        """Write one block, and with a chunk's first and last what stands around its elements."""
        chunk, data = self._chunk(target, box), byte_view(tensor)
        output = self._outputs[chunk.file]
        if box == chunk.blocks[0]:
            output.write(memoryview(chunk.archive.head), chunk.start)
        chunk.checksum = checksum_of(data, chunk.checksum)
        output.write(data, chunk.offset(box))
        if box == chunk.blocks[-1]:
            tail = chunk.archive.closing(chunk.checksum)
            output.write(memoryview(tail), chunk.start + chunk.archive.length - len(tail))

    def close(self) -> None:
        """Write `.metadata`, `common.pt` and `metadata.json`; close and sync all files."""
        for output in self._outputs.values():
            output.sync()
        self.abort()
        with open(self.folder / METADATA, "xb") as stream:
            pickle.dump(self._metadata(), stream)
        torch.save({"content_metadata": self.content}, self.folder / "common.pt")
        backend = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (self.folder / "metadata.json").write_text(json.dumps(backend))

    def _metadata(self) -> Any:
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )

        table: dict[str, Any] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for name, info in self.targets.items():
            chunks = []
            for chunk in self._chunks[name]:
                offsets = torch.Size(low for low, _ in chunk.box)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(high - low for low, high in chunk.box)))
                storage[MetadataIndex(name, offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.archive.length)
            properties = TensorProperties(dtype=getattr(torch, info.dtype))
            table[name] = TensorStorageMetadata(properties, torch.Size(info.shape), chunks)
        metadata = Metadata(table, None, storage, StorageMeta())
        metadata.version = "1.0.0"
        return metadata

    def abort(self) -> None:
        """Close the files."""
        while self._outputs:
            self._outputs.popitem()[1].close()


def _spread(targets: Mapping[str, TensorInfo], files: int) -> dict[str, str]:
    """Tensor -> file: the largest first, each to the file with the fewest bytes."""
    sizes = [0] * max(1, min(files, len(targets)))
    place = {}
    for name, info in sorted(targets.items(), key=lambda item: (-item[1].nbytes, item[0])):
        number = sizes.index(min(sizes))
        sizes[number] += info.nbytes
        place[name] = f"__0_{number}.distcp"
    return place


def _origin(box: Box) -> tuple[int, ...]:
    return tuple(low for low, _ in box)
