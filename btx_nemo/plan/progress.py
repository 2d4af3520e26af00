"""Progress in bytes, on stderr: a bar on a terminal, a line every tenth elsewhere, nothing for quick work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def human_bytes(count: int) -> str:
    """`1536` -> `1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{int(size)} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


@contextmanager
def byte_progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Yields `advance(bytes)`, safe to call from several threads."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)
        return
    yield _sparse_lines(total, label)


def _sparse_lines(total: int, label: str) -> Callable[[int], None]:
    lock = threading.Lock()
    begun = time.monotonic()
    state = {"done": 0, "tenth": 0}

    def advance(count: int) -> None:
        with lock:
            state["done"] += count
            tenth = 10 * state["done"] // max(total, 1)
            elapsed = time.monotonic() - begun
            # no line at the end: the command says what came of it, in one line when that is an error
            if tenth > state["tenth"] and elapsed > 2 and state["done"] < total:
                state["tenth"] = tenth
                rate = state["done"] / elapsed
                left = (total - state["done"]) / rate
                print(
                    f"{label}: {human_bytes(state['done'])} of {human_bytes(total)}, {human_bytes(int(rate))}/s, "
                    f"{left:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )

    return advance
