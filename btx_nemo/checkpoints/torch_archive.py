"""The archive that `torch.save` makes of one tensor, known around its data before these are there.

A zip file of stored members: a description, the elements, a directory with their CRC-32. All but the checksum depends
on shape and dtype alone, so that the place of every byte in a file of many archives is known beforehand.
"""

from __future__ import annotations

import functools
import io
import zipfile
import zlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Archive:
    """What is written before and after the elements."""

    head: bytes
    tail: bytes
    nbytes: int
    """Bytes of the elements."""
    checksums: tuple[int, ...]
    """Where in the tail their CRC-32 stands."""

    @property
    def length(self) -> int:
        """Bytes in all."""
        return len(self.head) + self.nbytes + len(self.tail)

    def closing(self, checksum: int) -> bytes:
        """The tail for elements of this CRC-32."""
        tail = bytearray(self.tail)
        for at in self.checksums:
            tail[at : at + 4] = checksum.to_bytes(4, "little")
        return bytes(tail)


@functools.lru_cache(maxsize=256)
def archive_of(shape: tuple[int, ...], dtype: str) -> Archive:
    """The archive of a contiguous tensor: torch's own of zeros, taken apart."""
    zeros = torch.zeros(shape, dtype=getattr(torch, dtype))
    stream = io.BytesIO()
    torch.save(zeros, stream)
    raw = stream.getbuffer()
    with zipfile.ZipFile(stream) as archive:
        (data,) = (member for member in archive.infolist() if member.filename.endswith("/data/0"))
    local = raw[data.header_offset : data.header_offset + 30]
    start = data.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    tail = bytes(raw[start + zeros.nbytes :])
    return Archive(bytes(raw[:start]), tail, zeros.nbytes, _places(tail, data))


def _places(tail: bytes, data: zipfile.ZipInfo) -> tuple[int, ...]:
    """In the descriptor right behind the data, and in the data's entry of the directory, 30 bytes before its name."""
    places = (4, tail.rindex(data.filename.encode()) - 30)
    assert all(tail[at : at + 4] == data.CRC.to_bytes(4, "little") for at in places)
    return places


def checksum_of(data: memoryview, before: int = 0) -> int:
    """CRC-32 of the bytes, after those that gave `before`."""
    return zlib.crc32(data, before)
