"""Output folders that appear whole or not at all."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btx_nemo.errors import UserError
from btx_nemo.plan.progress import human_bytes
from btx_nemo.processes import started

_counter = itertools.count()
TEMPORARY = re.compile(r"\..+\.((tmp|old)-[^/]+|partial)")
"""Names of folders that are being written, or were when a process died: never a checkpoint."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or a quota, that is full."""
_USERS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG)


def free_bytes(path: Path) -> int:
    """Bytes that this user can still write where `path` is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_free_space(out: Path, needed: int) -> None:
    """Raise UserError when fewer than `needed` bytes are free where `out` will be."""
    free = free_bytes(Path(os.path.abspath(out)))
    if free < needed:
        raise UserError(
            f"{out}: the result needs up to {human_bytes(needed)} ({needed} bytes), metadata included, but "
            f"{human_bytes(free)} are free; free space or choose another place"
        )


def hide(folder: Path) -> Path:
    """Makes a folder none at once, in a place of its own to be removed from.

    What of it cannot go now, because another process has it open or writes to it, is in nobody's way.
    """
    return folder.rename(folder.with_name(f".{folder.name}.old-{uuid.uuid4().hex[:8]}"))


def refuse_existing(out: Path) -> None:
    """Raise UserError when `out` is already there, in whatever form."""
    if os.path.lexists(out):
        raise UserError(f"{out}: already exists; choose another output folder or remove it")


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """A full disk or a place where one may not write is the user's to mend; other OS errors are not explained away."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise UserError(f"{out}: the disk became full; free space or choose another place") from None
        if error.errno in _USERS:
            where = error.filename or out
            raise UserError(
                f"{where}: {error.strerror}, so {out} cannot be made; check permissions, or choose another place"
            ) from None
        raise


@contextmanager
def atomic_dir(out: str | Path, needed_bytes: int = 0, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden sibling folder to fill; on success it is synced and renamed to `out`, else removed.

    With `overwrite`, an `out` that exists stays until then. Leftovers of processes that died while writing the same
    `out` on this host are removed first. Raises UserError when `out` exists, when it cannot be made, when the disk has
    less than `needed_bytes` free or becomes full.
    """
    out = Path(os.path.abspath(out))
    if not overwrite or out.is_symlink() or not out.is_dir():
        refuse_existing(out)
    tag = f"{_host()}-{os.getpid()}-{started(os.getpid())}-{next(_counter)}"
    temporary, old = (out.parent / f".{out.name}.{kind}-{tag}" for kind in ("tmp", "old"))
    with disk_errors(out):
        if out.parent.is_dir():
            _remove_stale(out)
        check_free_space(out, needed_bytes)
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            yield temporary
            fsync_tree(temporary)
            if overwrite and out.exists():
                os.rename(out, old)
            refuse_existing(out)
            os.rename(temporary, out)
            fsync_dir(out.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if old.exists() and not out.exists():
                os.rename(old, out)
            shutil.rmtree(old, ignore_errors=True)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


def _remove_stale(out: Path) -> None:
    pattern = re.compile(re.escape(f".{out.name}.") + "(?:tmp|old)-" + re.escape(f"{_host()}-") + r"(\d+)-(\d+)-\d+")
    for entry in os.scandir(out.parent):
        match = pattern.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False) and started(int(match[1])) != match[2]:
            shutil.rmtree(entry.path, ignore_errors=True)


def fsync_dir(path: Path) -> None:
    """Make a folder's entries (or a file's bytes) durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Make every file and folder below `folder`, and itself, durable."""
    for root, _, files in os.walk(folder):
        for name in files:
            fsync_dir(Path(root) / name)
        fsync_dir(Path(root))


def write_file(path: Path, text: str) -> None:
    """Write a small file that appears whole or not at all, and is durable when this returns."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    fsync_dir(path.parent)
