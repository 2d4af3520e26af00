"""Stopping on request: SIGTERM and SIGUSR1 ask for a checkpoint after the current step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from btx_nemo.errors import Stopped


class StopRequest:
    """Remembers that this rank was asked; the training step carries it to all ranks."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # One that asks again while a stopped run winds up must not end it by its default action.
        stopped = kind is not None and issubclass(kind, Stopped)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)
