"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """For a child to call first: it gets a signal when this process dies, by SIGKILL too.

    Linux; elsewhere it does nothing. Ranks save a checkpoint on SIGTERM, and torchrun passes it on to its ranks.
    """
    return functools.partial(end_with, os.getpid(), number)


def end_with(parent: int, number: int) -> None:
    """As `end_with_parent`, for a child that knows its parent."""
    prctl = getattr(_LIBC, "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before that
            os.kill(os.getpid(), number)


def started(pid: int) -> str:
    """When a process began, in ticks since boot; empty where there is none. Zombies have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
