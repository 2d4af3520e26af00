"""The demo's progress: which step, how far each training run is, and about how long it will take."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from btx_nemo.demo.processes import TrainProcess

_LINE_EVERY_SECONDS = 10.0


class Board:
    """One bar over all steps, and one a training run while it trains; lines now and then without a terminal."""

    def __init__(self, expected_seconds: Mapping[str, int]):
        self._expected = dict(expected_seconds)
        self._finished = 0.0
        self._spent = 0.0
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("[bold]{task.description:<14}"),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>4.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._overall = self._bars.add_task("demo", total=sum(self._expected.values()), text="")
        self._runs: dict[str, Any] = {}
        self._step, self._step_started, self._last_line = "", time.monotonic(), 0.0

    def __enter__(self) -> Board:
        self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Shows one step while entered."""
        self._step, self._step_started = name, time.monotonic()
        self._show(0.0, self._note())
        yield
        for task in self._runs.values():
            self._bars.remove_task(task)
        self._runs = {}
        seconds = time.monotonic() - self._step_started
        self._finished += self._expected[name]
        self._spent += seconds
        self._say(f"{name}: done in {seconds:.0f} s")

    def training(self, processes: Sequence[TrainProcess], newest: Mapping[str, dict]) -> None:
        """Shows how far training runs are, from their newest metrics."""
        done = 0.0
        for process in processes:
            record = newest.get(process.name, {})
            share = record.get("step", 0) / max(process.steps, 1)
            done += share / len(processes)
            if process.name not in self._runs:
                self._runs[process.name] = self._bars.add_task(f"  {process.name}", total=1.0, text="starting")
            if record:
                text = f"loss {record['loss']:.3f}  {record['tokens_per_second']:,.0f} tok/s"
                self._bars.update(self._runs[process.name], completed=share, text=text)
        self._show(done, self._note(done))
        if self._bars.disable and time.monotonic() - self._last_line > _LINE_EVERY_SECONDS:
            steps = "  ".join(f"{p.name} {newest.get(p.name, {}).get('step', 0)}/{p.steps}" for p in processes)
            self._say(f"{self._step}: {steps}; {self._note(done)}")

    def _note(self, done: float = 0.0) -> str:
        """About how long the rest takes: what was expected, at the pace seen so far."""
        pace = self._spent / self._finished if self._finished else 1.0
        position = list(self._expected).index(self._step)
        later = sum(list(self._expected.values())[position + 1 :]) * pace
        here = self._expected[self._step] * pace * (1 - done)
        return f"{self._step}; about {max(here + later, 1):.0f} s left"

    def _show(self, done: float, text: str) -> None:
        self._bars.update(self._overall, completed=self._finished + done * self._expected[self._step], text=text)

    def _say(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self._bars.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bars.console.print(text, highlight=False)
