"""Reading and writing large files past the page cache.

A checkpoint is written once and is larger than what a machine caches: through the cache every byte costs a page, a copy
and a later write-back, and pushes out the sources that are still to be read. Straight to the disk it costs the disk's
time, most of which other threads compute in. Sources that are read once are read so too, but for what the cache has of
them. File systems that do not offer it (tmpfs, some network ones) are read and written as usual; the bytes are the
same.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import numpy as np

from btx_nemo.plan.layout import PAGE

UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)
"""What a file system says that does not read or write past the cache."""


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor that goes past the cache; None where the operating system or the file system has no such thing."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return None


class OutputFile:
    """A new file of known size, filled at any offset from any thread."""

    def __init__(self, path: Path, size: int) -> None:
        self._fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)]
        os.ftruncate(self._fds[0], size)
        past = open_direct(path, os.O_WRONLY)
        self._fds += [] if past is None else [past]
        self.direct = past is not None
        """Whether whole pages go past the cache."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset.

        Whole pages go to the disk where `offset` and the address of `data` agree modulo `PAGE`; the rest, and all
        where they do not, through the cache.
        """
        head = min(-offset % PAGE, len(data))
        body = (len(data) - head) // PAGE * PAGE
        if not (self.direct and body and (address(data) + head) % PAGE == 0):
            return _pwrite(self._fds[0], data, offset)
        _pwrite(self._fds[0], data[:head], offset)
        done = self._write_pages(data[head : head + body], offset + head)
        _pwrite(self._fds[0], data[head + done :], offset + head + done)
        return None

    def _write_pages(self, data: memoryview, offset: int) -> int:
        """Bytes that were written past the cache; fewer than given only where that stopped being possible."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fds[1], data[done:], offset + done)
                if done % PAGE:  # a short write: what follows is not aligned
                    break
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.direct = False
        return done

    def sync(self) -> None:
        """Make what was written durable."""
        os.fsync(self._fds[0])

    def close(self) -> None:
        """Close the file."""
        while self._fds:
            os.close(self._fds.pop())


READ_BYTES = 4 << 20
"""Bytes that are read past the cache at once, at most."""
WORTH = 128 << 10
"""Shorter reads go through the cache, which reads ahead for the next one."""
_bounce = threading.local()


class PastCache:
    """An open file, read from the page cache where that has it, else past it and without a trace in it."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path = fd, path
        self._direct: int | None = None
        self._tried = False

    def read(self, out: memoryview, offset: int) -> int:
        """Read up to the length of `out`; the number of bytes, 0 at the end of the file."""
        if len(out) >= WORTH and not is_cached(self._fd, offset, len(out)):
            if not self._tried:
                self._direct, self._tried = open_direct(self._path, os.O_RDONLY), True
            if self._direct is not None:
                try:
                    return self._read_pages(self._direct, out[:READ_BYTES], offset)
                except OSError as error:
                    if error.errno not in UNSUPPORTED:
                        raise
        return os.preadv(self._fd, [out], offset)

    def _read_pages(self, direct: int, out: memoryview, offset: int) -> int:
        first = offset // PAGE * PAGE
        last = (offset + len(out) + PAGE - 1) // PAGE * PAGE
        pages = _pages()[: last - first]
        count = os.preadv(direct, [pages], first) - (offset - first)
        count = max(0, min(count, len(out)))
        out[:count] = pages[offset - first : offset - first + count]
        return count

    def close(self) -> None:
        """Close what was opened here; the file itself stays open."""
        if self._direct is not None:
            os.close(self._direct)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


_CACHESTAT = 451
"""Number of the system call, the same on every architecture (Linux 6.5)."""
_libc = ctypes.CDLL(None, use_errno=True)


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Whether the page cache holds most of a range of a file; yes where the kernel cannot say."""
    found = _Cachestat()
    where = _Range(offset, length)
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(where), ctypes.byref(found), 0):
        return True
    return bool(2 * found.cached * PAGE >= length)


def _pages() -> memoryview:
    """This thread's buffer, on a page."""
    if not hasattr(_bounce, "pages"):
        block = memoryview(bytearray(READ_BYTES + 3 * PAGE))
        start = -address(block) % PAGE
        _bounce.pages = block[start : start + READ_BYTES + 2 * PAGE]
    return _bounce.pages


def address(data: memoryview) -> int:
    """Where bytes lie in memory."""
    return np.frombuffer(data, np.uint8).ctypes.data


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
