"""The torch_dist format on disk: `.metadata`, and chunks that are each a small `torch.save` archive inside a file."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints import restricted_pickle
from btx_nemo.checkpoints.files import read_regular
from btx_nemo.checkpoints.reader import pread_exactly
from btx_nemo.checkpoints.restricted_pickle import Record
from btx_nemo.errors import UserError
from btx_nemo.plan.layout import ITEMSIZE, Box, TensorInfo

METADATA = ".metadata"
MAX_METADATA = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """One stored part of a tensor, and the byte range of a file that holds its archive."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint and its chunks."""

    info: TensorInfo
    chunks: tuple[Chunk, ...]


_RECORD_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.storage",
)
_MCORE_RECORDS = {"MCoreMetadata", "MCoreSavePlan"}


def _metadata_global(module: str, name: str) -> Any:
    if module in _RECORD_MODULES and name.replace("_", "").isalpha():
        return Record
    if module.startswith("megatron.core.dist_checkpointing.") and name in _MCORE_RECORDS:
        return Record
    if module == "torch":
        if name == "Size":
            return tuple
        if name in ITEMSIZE:
            return name
        if name == "device":
            return Record
    if (module, name) == ("torch.serialization", "_get_layout"):
        return lambda layout: layout
    if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
        return lambda *parts: "/".join(map(str, parts))
    if (module, name) in (("collections", "OrderedDict"), ("builtins", "dict")):
        return dict
    if (module, name) == ("builtins", "set"):
        return set
    return None


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint (objects that are not tensors are left out).

    Raises UserError on anything damaged, or whose chunks do not cover each tensor exactly.
    """
    path = folder / METADATA
    metadata = restricted_pickle.load(read_regular(path, MAX_METADATA), _metadata_global, str(path))
    try:
        table, storage = metadata.state_dict_metadata, metadata.storage_data
        places = {}
        for index, info in storage.items():  # an index leaves out what is None
            places[index.fqn, tuple(index.state.get("offset") or ())] = info
        tensors = {}
        for key, value in table.items():
            if "chunks" in value.state:
                tensors[key] = _stored_tensor(key, value, places, path)
        return tensors
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path}: not the metadata of a checkpoint ({error}); damaged, copy it again") from None


def _stored_tensor(key: str, value: Record, places: dict[Any, Record], path: Path) -> StoredTensor:
    properties = value.properties
    dtype = properties.state["dtype"] if properties.state else properties.args[0]
    info = TensorInfo(tuple(int(size) for size in value.size), dtype)
    chunks = []
    for chunk in value.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        place = places.get((key, offsets))
        if place is None:
            raise UserError(f"{path}: tensor {key!r}: no place recorded for its part at {list(offsets)}; damaged")
        if place.state.get("transform_descriptors"):
            raise UserError(f"{path}: tensor {key!r} is stored compressed, which is not supported; save it plain")
        file = place.relative_path
        if not isinstance(file, str) or file != os.path.basename(file):
            raise UserError(f"{path}: tensor {key!r}: {file!r} is not a file of this folder")
        box = tuple((low, low + size) for low, size in zip(offsets, sizes, strict=True))
        chunks.append(Chunk(box, file, int(place.offset), int(place.length)))
    covered = sum(prod(high - low for low, high in chunk.box) for chunk in chunks)
    inside = all(0 <= low <= high <= size for c in chunks for (low, high), size in zip(c.box, info.shape, strict=True))
    if covered != info.numel or not inside or len({c.box for c in chunks}) != len(chunks):
        raise UserError(f"{path}: tensor {key!r}: its parts hold {covered} of {info.numel} elements; damaged")
    return StoredTensor(info, tuple(chunks))


@dataclass(frozen=True)
class Payload:
    """Where a chunk's raw elements lie in its file."""

    start: int
    info: TensorInfo


def locate(fd: int, chunk: Chunk, path: str, name: str) -> Payload:
    """Find the raw elements inside a chunk's archive, reading its directory only.

    Raises UserError when it is not the plain, contiguous archive that `torch.save` makes of one tensor.
    """
    if chunk.offset < 0 or chunk.length < 22 or chunk.offset + chunk.length > os.fstat(fd).st_size:
        raise UserError(f"{path}: tensor {name!r} lies beyond the end of the file; truncated, copy it again")
    try:
        with zipfile.ZipFile(_Window(fd, chunk.offset, chunk.length)) as archive:  # type: ignore[arg-type]
            members = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
            description = members["data.pkl"]
            if description.compress_type != zipfile.ZIP_STORED or description.file_size > 1 << 20:
                raise UserError(f"{path}: tensor {name!r}: its description is not plain; not a checkpoint of ours")
            kind = archive.read(description)
    except (zipfile.BadZipFile, KeyError, OSError, ValueError, NotImplementedError, EOFError, struct.error) as error:
        raise UserError(f"{path}: tensor {name!r}: part is damaged ({error}); copy the file again") from None
    info, storage_offset, key = _describe_tensor(kind, f"{path}: tensor {name!r}")
    data = members.get(f"data/{key}")
    needed = storage_offset * ITEMSIZE[info.dtype] + info.nbytes
    if data is None or data.compress_type != zipfile.ZIP_STORED or data.file_size < needed:
        raise UserError(f"{path}: tensor {name!r}: its data is missing or compressed; damaged")
    local = bytearray(30)
    pread_exactly(fd, chunk.offset + data.header_offset, memoryview(local), path, name)
    name_length, extra_length = struct.unpack("<HH", local[26:30])
    start = data.header_offset + 30 + name_length + extra_length
    if local[:4] != b"PK\x03\x04" or start + needed > chunk.length:
        raise UserError(f"{path}: tensor {name!r}: its data does not fit the part; damaged")
    return Payload(chunk.offset + start + storage_offset * ITEMSIZE[info.dtype], info)


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


def _tensor_global(module: str, name: str) -> Any:
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        return Record
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    return _STORAGES.get(name) if module == "torch" else None


def _describe_tensor(pickled: bytes, where: str) -> tuple[TensorInfo, int, str]:
    record = restricted_pickle.load(pickled, _tensor_global, where, lambda pid: pid)
    try:
        (_, dtype, key, _, _), storage_offset, shape, strides = record.args[:4]
        expected = 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size != 1 and stride != expected:
                raise UserError(f"{where}: its part is not stored contiguously; save the checkpoint again")
            expected *= size
        return TensorInfo(tuple(shape), dtype), int(storage_offset), str(key)
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"{where}: part is not one tensor; damaged") from None


class _Window(io.RawIOBase):
    """A byte range of a file as a file of its own, read by pread."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._length, self._position = fd, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._position, 0)
        count = left if size is None or size < 0 else min(size, left)
        data = os.pread(self._fd, count, self._offset + self._position)
        self._position += len(data)
        return data
