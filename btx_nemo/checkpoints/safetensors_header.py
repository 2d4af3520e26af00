"""The header of a safetensors file, read and checked strictly."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.files import open_regular
from btx_nemo.checkpoints.reader import pread_exactly
from btx_nemo.errors import UserError
from btx_nemo.plan.layout import ITEMSIZE, TensorInfo

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' names of dtypes -> torch's."""
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}
MAX_HEADER = 100_000_000
"""The format's own limit."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: what it is, and the byte where it begins in the file."""

    info: TensorInfo
    start: int


@dataclass(frozen=True)
class Header:
    """A file's tensors and its free-form metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    size: int
    """Bytes of the whole file."""


def read_header(path: Path) -> Header:
    """Read and check one file's header: length, JSON, dtypes, shapes, and offsets that cover the file exactly.

    Raises UserError naming the file and, where there is one, the tensor.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size < 8:
            raise UserError(f"{path}: {size} bytes is too short for a safetensors file; copy it again")
        prefix = bytearray(8)
        pread_exactly(fd, 0, memoryview(prefix), str(path), "header")
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8 or length > MAX_HEADER:
            raise UserError(
                f"{path}: header length {length} does not fit a file of {size} bytes; truncated, or not safetensors"
            )
        raw = bytearray(length)
        pread_exactly(fd, 8, memoryview(raw), str(path), "header")
    finally:
        os.close(fd)
    table = _parse(bytes(raw), path)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: header's __metadata__ is not a table of strings; not a valid safetensors file")
    return Header(_entries(table, 8 + length, size, path), metadata, size)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path}: header names {twice!r} twice; not a valid safetensors file")
        return table

    if not raw.startswith(b"{"):
        raise UserError(f"{path}: header does not start with '{{'; not a safetensors file")
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: header is not valid JSON; not a safetensors file, or damaged") from None
    if not isinstance(table, dict):
        raise UserError(f"{path}: header is not a table; not a safetensors file")
    return table


def _entries(table: dict[str, Any], data: int, size: int, path: Path) -> dict[str, Entry]:
    entries = {}
    spans = []
    for name, value in table.items():
        dtype, shape, (begin, end) = _fields(name, value, path)
        info = TensorInfo(tuple(shape), DTYPES[dtype])
        if prod(shape) * ITEMSIZE[info.dtype] != end - begin:
            raise UserError(
                f"{path}: tensor {name!r}: shape {shape} of {dtype} needs {info.nbytes} bytes "
                f"but its offsets hold {end - begin}; the file is damaged"
            )
        entries[name] = Entry(info, data + begin)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            kind = "overlaps the one before" if begin < position else "leaves a gap before it"
            raise UserError(f"{path}: tensor {name!r} {kind} (offset {begin}, expected {position}); damaged")
        position = end
        if data + end > size:
            raise UserError(
                f"{path}: tensor {name!r} ends at byte {data + end} but the file has {size}; truncated, copy it again"
            )
    if data + position != size:
        raise UserError(f"{path}: {size - data - position} bytes after the last tensor; the file is damaged")
    return entries


def _fields(name: str, value: Any, path: Path) -> tuple[str, list[int], list[int]]:
    def naturals(part: Any) -> bool:
        return isinstance(part, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in part)

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{path}: tensor {name!r}: header entry is not dtype, shape, data_offsets; damaged")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{path}: tensor {name!r}: dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    if not naturals(shape) or len(shape) > 16:
        raise UserError(f"{path}: tensor {name!r}: shape {str(shape)[:80]} is not a list of sizes; damaged")
    if not naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(f"{path}: tensor {name!r}: offsets {str(offsets)[:80]} are not a range; damaged")
    return dtype, shape, offsets
