"""Megatron's `.bin/.idx` seen from outside: a check that needs no torch, and a plain reader.

Layout of `.idx`: magic (9 bytes), version u64 = 1, dtype code u8, sequences u64, documents u64, then int32 lengths,
int64 byte offsets (one per sequence) and int64 document boundaries. `.bin` holds the token ids, nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from btx_nemo.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_FULL_SCAN_BYTES = 64 << 20
"""Up to this size every token id is looked at; larger files are sampled, since every rank runs the check."""
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    """What the index says, once it is known to agree with the files."""

    prefix: Path
    dtype: Any
    lengths: np.ndarray
    """Tokens of each sequence."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the `.bin`."""
        return int(self.lengths.sum(dtype=np.int64))

    @cached_property
    def _ids(self) -> np.ndarray:
        return np.memmap(_with(self.prefix, ".bin"), dtype=self.dtype, mode="r") if self.num_tokens else np.empty(0)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def document(self, number: int) -> np.ndarray:
        """The ids of one sequence."""
        start = int(self._starts[number])
        return np.asarray(self._ids[start : start + int(self.lengths[number])])

    def documents(self) -> Iterator[np.ndarray]:
        """The sequences in their order, each an array of token ids."""
        return map(self.document, range(len(self.lengths)))


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def open_indexed(prefix: Path, *, vocab_size: int | None = None) -> IndexedFile:
    """Read and check `prefix.idx` against `prefix.bin`.

    Args:
        prefix: the path without suffix.
        vocab_size: when given, no token id may reach it (all ids are checked up to 64 MiB, a spread sample above).

    Raises:
        UserError: naming the file, if one is missing, truncated, of another format, or holds ids out of range.
    """
    idx, bin_ = _with(prefix, ".idx"), _with(prefix, ".bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise UserError(f"{path}: missing; run prepare-data again")
    index = _read_index(idx)
    expected, size = index.num_tokens * np.dtype(index.dtype).itemsize, bin_.stat().st_size
    if size != expected:
        raise UserError(
            f"{bin_}: {size} bytes where its index needs {expected}; copy it again or run prepare-data again"
        )
    if vocab_size is not None:
        _check_ids(bin_, index.dtype, vocab_size)
    return index


def _read_index(path: Path) -> IndexedFile:
    remedy = "copy it again or run prepare-data again"
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise UserError(f"{path}: not a Megatron index (wrong first bytes); {remedy}")
        _, version, code, sequences, documents = _HEADER.unpack(head)
        if version != 1 or code not in _DTYPES:
            raise UserError(f"{path}: index version {version} with dtype code {code} is not known; {remedy}")
        expected = _HEADER.size + 12 * sequences + 8 * documents
        if size != expected:  # before the reads below, so that a huge count cannot ask for huge memory
            raise UserError(f"{path}: {size} bytes where {expected} are declared; {remedy}")
        lengths = np.frombuffer(stream.read(4 * sequences), dtype=np.int32)
        offsets = np.frombuffer(stream.read(8 * sequences), dtype=np.int64)
        bounds = np.frombuffer(stream.read(8 * documents), dtype=np.int64)
    dtype = _DTYPES[code]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    whole = (
        (lengths >= 0).all()
        and (offsets == starts * np.dtype(dtype).itemsize).all()
        and len(bounds) > 0
        and bounds[0] == 0
        and bounds[-1] == sequences
        and (np.diff(bounds) >= 0).all()
    )
    if not whole:
        raise UserError(f"{path}: its lengths, offsets and document bounds contradict each other; {remedy}")
    return IndexedFile(prefix=path.with_suffix(""), dtype=dtype, lengths=lengths)


def _check_ids(path: Path, dtype: Any, vocab_size: int) -> None:
    count = path.stat().st_size // np.dtype(dtype).itemsize
    if not count:
        return
    ids = np.memmap(path, dtype=dtype, mode="r")
    block = _BLOCK_BYTES // np.dtype(dtype).itemsize
    if ids.nbytes <= _FULL_SCAN_BYTES:
        starts = list(range(0, count, block))
    else:
        starts = np.linspace(0, count - block, _SAMPLED_BLOCKS, dtype=np.int64).tolist()
    for start in starts:
        part = ids[start : start + block]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"{path}: token id {high if high >= vocab_size else low} is outside the vocabulary of {vocab_size}; "
                "prepare the data with the model's tokenizer"
            )
