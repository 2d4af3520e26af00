"""A run in which nothing ends any more is ended, with the stacks of its threads left in a file."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from btx_nemo.config.schema import RobustConfig
from btx_nemo.train.failure import claim

CODE = 70
"""Exit code of a rank that hung (EX_SOFTWARE); torchrun makes it 1."""
GRACE = 30.0
"""Seconds after which a rank is ended even if its interpreter cannot run the watchdog."""


def timeout_minutes(robust: RobustConfig) -> int:
    """How long collectives wait for other ranks: a little longer than the watchdog, which says more."""
    return math.ceil(robust.hang_seconds / 60) + 1 if robust.hang_seconds else 30


class HangDetector:
    """Ends this process when `beat` was not called for `seconds`; 0 for never.

    A thread watches: whatever waits in a collective or in the device lets others run. Where even that does not happen,
    faulthandler's own timer, which needs no interpreter, ends the process a little later.
    """

    def __init__(self, out: Path, rank: int, seconds: float):
        self.out, self.rank, self.seconds = out, rank, seconds
        self.last = "the start"
        """What ended last."""
        self._at = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang detector", daemon=True)

    def beat(self, what: str) -> None:
        """Something ended: a step, a validation, a checkpoint."""
        self.last, self._at = what, time.monotonic()

    def __enter__(self) -> HangDetector:
        if self.seconds:
            self.beat("the start")
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self.seconds:
            self._thread.join()  # else it could arm the timer once more
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        every = min(self.seconds / 4, 10.0)
        while not self._ended.wait(every):
            faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True)
            waited = time.monotonic() - self._at
            if waited > self.seconds:
                self._end(waited)

    def _end(self, waited: float) -> None:
        path = self.out / f"hang-rank-{self.rank}.txt"
        with contextlib.suppress(OSError), path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        line = (
            f"{self.out}: rank {self.rank}: nothing has ended in {waited:.0f} s after {self.last} "
            f"(robust.hang_seconds={self.seconds:g}); the stacks of all threads are in {path.name}"
        )
        if claim(self.out, self.rank, line):
            print(f"btx-nemo train: {line}", file=sys.stderr, flush=True)
        os._exit(CODE)
