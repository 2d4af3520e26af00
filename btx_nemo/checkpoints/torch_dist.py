"""Reading and writing Megatron's torch_dist checkpoints without Megatron and without building a model."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from btx_nemo.checkpoints.direct import PastCache
from btx_nemo.checkpoints.dist_format import METADATA, Payload, StoredTensor, locate, read_metadata
from btx_nemo.checkpoints.files import open_regular
from btx_nemo.checkpoints.reader import Reader, read_box
from btx_nemo.checkpoints.respelled import SPELLINGS
from btx_nemo.errors import UserError
from btx_nemo.plan.layout import Box, Layout, TensorInfo, row_blocks
from btx_nemo.plan.plan import Job

STATE_PREFIXES = ("optimizer.", "chained_", "rng_state", "common_state", "opt_param_scheduler", "rerun_state")
"""Keys of training state, which a model's weights never begin with."""


class DistReader(Reader):
    """The model weights of a torch_dist checkpoint; keys of training state are left out.

    Raises UserError naming file and tensor when something is missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.training_state: list[str] = []
        """Keys that were left out."""
        self._tensors: dict[str, StoredTensor] = {}
        for key, tensor in read_metadata(self.folder).items():
            if key.startswith(STATE_PREFIXES):
                self.training_state.append(key)
            else:
                self._tensors[key] = tensor
        self._layout = {key: tensor.info for key, tensor in self._tensors.items()}
        self._payloads: dict[tuple[str, int], Payload] = {}
        self._check_files()

    def _check_files(self) -> None:
        ends: dict[str, tuple[int, str]] = {}
        for key, tensor in self._tensors.items():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, (0, "")), (chunk.offset + chunk.length, key))
        for file, (end, key) in ends.items():
            fd = open_regular(self.folder / file)
            size = os.fstat(fd).st_size
            os.close(fd)
            if size < end:
                raise UserError(
                    f"{self.folder / file}: tensor {key!r} ends at byte {end} but the file has {size}; truncated"
                )

    def layout(self) -> Layout:
        """Names, global shapes and dtypes of the model's tensors."""
        return self._layout

    def where(self, name: str) -> str:
        """The file with the tensor's first part."""
        return str(self.folder / self._tensors[name].chunks[0].file)

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read one part from the chunks that it meets, and only the bytes that it needs of them."""
        for number, chunk in enumerate(self._tensors[name].chunks):
            meet = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, chunk.box, strict=True))
            if any(low >= high for low, high in meet):
                continue
            inside = tuple((low - base, high - base) for (low, high), (base, _) in zip(meet, chunk.box, strict=True))
            view = out[tuple(slice(low - base, high - base) for (low, high), (base, _) in zip(meet, box, strict=True))]
            self._read_chunk(name, number, inside, view)

    def _read_chunk(self, name: str, number: int, box: Box, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        chunk = tensor.chunks[number]
        path = str(self.folder / chunk.file)
        fd = open_regular(self.folder / chunk.file)
        past = PastCache(fd, self.folder / chunk.file)
        try:
            payload = self._payloads.get((name, number))
            if payload is None:
                payload = self._payloads[name, number] = locate(fd, chunk, path, name)
            shape = tuple(high - low for low, high in chunk.box)
            if payload.info != TensorInfo(shape, tensor.info.dtype):
                raise UserError(
                    f"{path}: tensor {name!r}: part is {payload.info}, not {list(shape)} as recorded; damaged"
                )
            whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
            read_box(past if self.once else fd, payload.start, shape, box, whole, path, name)
            if whole is not out:
                out.copy_(whole)
        finally:
            past.close()
            os.close(fd)


class DistSink:
    """Writes a torch_dist checkpoint that `megatron.core.dist_checkpointing.load` reads (0.16 to 0.19).

    Tensors are stored as chunks of at most `chunk_bytes`, spread over files in a way that does not depend on the
    number of workers; one worker at a time appends to a file, so memory stays at one chunk per worker. Megatron is
    told how keys are spelled (`dist_checkpointing.load_content_metadata`).
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
        self.content = SPELLINGS[spelling]
        self.targets = dict(targets)
        self._boxes = {name: row_blocks(info, chunk_bytes) for name, info in self.targets.items()}
        self._file_of = _spread(self.targets, files)
        self._streams: dict[str, Any] = {}
        self._places: dict[tuple[str, Box], tuple[str, int, int]] = {}

    def work(self, jobs: tuple[Job, ...]) -> list[list[tuple[Job, Box]]]:
        """One list per file."""
        lists: dict[str, list[tuple[Job, Box]]] = {file: [] for file in sorted(set(self._file_of.values()))}
        for job in jobs:
            lists[self._file_of[job.target]] += [(job, box) for box in self._boxes[job.target]]
        return list(lists.values())

    def offset(self, target: str, box: Box) -> int:
        """Not known before: an archive's header precedes a part."""
        return 0

    def write(self, target: str, box: Box, tensor: torch.Tensor) -> None:
        """Append one chunk, as a `torch.save` archive, to its file."""
        file = self._file_of[target]
        stream = self._streams.get(file)
        if stream is None:
            stream = self._streams[file] = open(self.folder / file, "xb")  # noqa: SIM115
        offset = stream.tell()
        torch.save(tensor.clone(), stream)  # a copy of its own: torch.save stores the whole memory behind a view
        self._places[target, box] = (file, offset, stream.tell() - offset)

    def close(self) -> None:
        """Write `.metadata`, `common.pt` and `metadata.json`; close and sync all files."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
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
            for box in self._boxes[name]:
                offsets = torch.Size(low for low, _ in box)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(high - low for low, high in box)))
                file, offset, length = self._places[name, box]
                storage[MetadataIndex(name, offsets)] = _StorageInfo(file, offset, length)
            properties = TensorProperties(dtype=getattr(torch, info.dtype))
            table[name] = TensorStorageMetadata(properties, torch.Size(info.shape), chunks)
        metadata = Metadata(table, None, storage, StorageMeta())
        metadata.version = "1.0.0"
        return metadata

    def abort(self) -> None:
        """Close the files."""
        while self._streams:
            self._streams.popitem()[1].close()


def _spread(targets: Mapping[str, TensorInfo], files: int) -> dict[str, str]:
    """Tensor -> file: the largest first, each to the file with the fewest bytes."""
    sizes = [0] * max(1, min(files, len(targets)))
    place = {}
    for name, info in sorted(targets.items(), key=lambda item: (-item[1].nbytes, item[0])):
        number = sizes.index(min(sizes))
        sizes[number] += info.nbytes
        place[name] = f"__0_{number}.distcp"
    return place
