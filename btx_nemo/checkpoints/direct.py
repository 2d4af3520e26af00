"""Writing large files past the page cache.

A checkpoint is written once and is larger than what a machine caches: through the cache every byte costs a page, a copy
and a later write-back, and pushes out the sources that are still to be read. Straight to the disk it costs the disk's
time, most of which other threads compute in. File systems that do not offer it (tmpfs, some network ones) are
written to as usual; the bytes are the same.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from btx_nemo.plan.layout import PAGE


class OutputFile:
    """A new file of known size, filled at any offset from any thread."""

    def __init__(self, path: Path, size: int) -> None:
        self._fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)]
        os.ftruncate(self._fds[0], size)
        self.direct = False
        """Whether whole pages go past the cache."""
        try:
            self._fds.append(os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC))
            self.direct = True
        except (OSError, AttributeError):  # the file system, or the operating system, has no such thing
            pass

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
            if error.errno != errno.EINVAL:
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


def address(data: memoryview) -> int:
    """Where bytes lie in memory."""
    return np.frombuffer(data, np.uint8).ctypes.data


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
