"""Small files: only regular ones are read, and never more of them than such a file can have."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from btx_nemo.errors import UserError

MAX_JSON = 256 << 20


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; refuses, at once, whatever is not a regular file.

    O_NONBLOCK keeps a FIFO from blocking the open. Raises UserError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is the folder complete?") from None
    except OSError as error:  # ELOOP (symlink loop), EACCES, ENXIO (socket)
        raise UserError(f"{path}: cannot be opened ({error.strerror}); make it a readable regular file") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UserError(f"{path}: not a regular file; expected a file with data")
    return fd


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a small regular file; UserError when it is larger than `limit` bytes."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise UserError(f"{path}: {size} bytes is more than such a file can have ({limit}); is it the right file?")
        data = bytearray()
        while chunk := os.read(fd, 1 << 20):
            data += chunk
            if len(data) > limit:
                raise UserError(f"{path}: grows while it is read; wait until it is complete")
        return bytes(data)
    finally:
        os.close(fd)


def read_json(path: Path) -> dict:
    """A JSON file that holds a table; UserError when it is missing, too large or not such a file."""
    try:
        table = json.loads(read_regular(path, MAX_JSON).decode("utf-8"))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON; copy the file again") from None
    if not isinstance(table, dict):
        raise UserError(f"{path}: expected a JSON table")
    return table


def write_json(path: Path, table: Any) -> None:
    """Write a small JSON file, indented, in the given order."""
    path.write_text(json.dumps(table, indent=2) + "\n")
