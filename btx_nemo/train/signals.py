"""Stopping on request: SIGTERM and SIGUSR1 ask for a checkpoint after the current step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from btx_nemo.errors import Stopped
from btx_nemo.megatron.platform import device


class StopRequest:
    """Set by a signal on any rank; `agreed` tells all ranks at the same step."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # One that asks again while a stopped run winds up must not end it by its default action.
        stopped = kind is not None and issubclass(kind, Stopped)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. Collective."""
        flag = torch.tensor([float(self._asked)], device=device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
