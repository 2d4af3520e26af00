"""A run in which nothing ends any more is ended, with the stacks of its threads left in a file."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

CODE = 70
"""Exit code of a rank that hung (EX_SOFTWARE); torchrun makes it 1."""
GRACE = 30.0
"""Seconds after which a rank is ended even if its interpreter cannot run the watchdog."""


class HangDetector:
    """Ends this process when `beat` was not called for `seconds`; 0 for never.

    A thread watches: whatever waits in a collective or in the device lets others run. Where even that does not happen,
    faulthandler's own timer, which needs no interpreter, ends the process a little later.
    """

    def __init__(self, folder: Path, rank: int, seconds: float):
        self.seconds, self.rank = seconds, rank
        self.path = folder / f"hang-rank-{rank}.txt"
        self._what, self._at = "the start", time.monotonic()
        self._ended = threading.Event()

    def beat(self, what: str) -> None:
        """Something ended: a step, a validation, a checkpoint."""
        self._what, self._at = what, time.monotonic()

    def __enter__(self) -> HangDetector:
        if self.seconds:
            self.path.unlink(missing_ok=True)
            self._file = self.path.with_suffix(".tmp").open("w")
            self.beat("the start")
            threading.Thread(target=self._watch, name="hang detector", daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()

    def _watch(self) -> None:
        every = min(self.seconds / 4, 10.0)
        while not self._ended.wait(every):
            faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True, file=self._file)
            waited = time.monotonic() - self._at
            if waited > self.seconds:
                self._end(waited)

    def _end(self, waited: float) -> None:
        with self.path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        print(
            f"btx-nemo train: rank {self.rank}: nothing has ended in {waited:.0f} s after {self._what} "
            f"(robust.hang_seconds={self.seconds:g}); the stacks of all threads are in {self.path}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(CODE)
