"""A progress bar in bytes: live on a terminal, otherwise a line every few seconds on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINE_SECONDS = 10.0


@contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield `advance(num_bytes)`; nothing is printed without a terminal before ten seconds have passed."""
    if not sys.stderr.isatty():
        yield _sparse_lines(description, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)


def _sparse_lines(description: str, total: int) -> Callable[[int], None]:
    done, last = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= _LINE_SECONDS:
            last = now
            print(f"{description}: {done / 1e6:.1f} of {total / 1e6:.1f} MB", file=sys.stderr, flush=True)

    return advance
