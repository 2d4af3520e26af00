"""One process at a time in a run directory: two would take each other's half-written checkpoints for leftovers."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from btx_nemo.errors import UserError

LOCK = ".lock"


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[bool]:
    """Makes `out` if need be and holds its lock while entered; yields whether it was made. First rank of a job only.

    The lock ends with the process, however that ends, and those that it started and that outlive it do not have it.
    Raises UserError when another process holds it.
    """
    if int(os.environ.get("RANK", "0")):
        yield False
        return
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"out={out}: another process trains in it; wait for it, or choose another out") from None
        yield made
