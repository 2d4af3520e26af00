"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from btx_nemo.errors import UserError

_USERS_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
)


@contextmanager
def publish(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A scratch folder beside `target` that becomes it if the block ends well, and vanishes if it does not.

    Raises:
        UserError: `target` is there when the block ends, and is not to be overwritten.
    """
    folder = target.parent
    _remove_abandoned(folder, target.name)
    tag = f"{target.name}.{socket.gethostname()}.{os.getpid()}"
    scratch, old = folder / f".tmp-{tag}", folder / f".old-{tag}"
    scratch.mkdir()
    try:
        yield scratch
        sync(scratch)
        if target.exists():
            if not overwrite:
                raise UserError(f"{target}: was made by another run in the meantime")
            os.rename(target, old)
        os.rename(scratch, target)
        sync(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if old.exists() and not target.exists():
            os.rename(old, target)
        shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(folder: Path, name: str) -> None:
    """Scratch folders of runs of this host that were killed."""
    for kind in ("tmp", "old"):
        for path in folder.glob(f".{kind}-{name}.{socket.gethostname()}.*"):
            pid = path.name.rpartition(".")[2]
            if pid.isdigit() and not _alive(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def disk_errors(out_dir: Path) -> Iterator[None]:
    """A full disk or a read-only folder is the user's to mend; other OS errors are not explained away."""
    try:
        yield
    except OSError as error:
        if error.errno not in _USERS_ERRNOS:
            raise
        raise UserError(
            f"{error.filename or out_dir}: {error.strerror}; check permissions and free space, or take another folder"
        ) from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write and sync a JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
