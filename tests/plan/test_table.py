"""What a plan looks like before it runs, and how progress is told."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from btx_nemo.plan import progress
from btx_nemo.plan.expr import Concat, Slice, Take, describe
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.progress import human_bytes
from btx_nemo.plan.table import print_plan


def plan() -> Plan:
    layout = {"s": {"a": TensorInfo((8, 3), "float32"), "b": TensorInfo((1,), "float32")}}
    halves = Concat((Slice(Take("s", "a"), 0, 4, 8), Slice(Take("s", "a"), 0, 0, 4)))
    return Plan((Job("t", TensorInfo((8, 3), "float32"), halves),), layout, {("s", "b"): "a buffer"})


@pytest.mark.parametrize("terminal", [True, False])
def test_expressions_are_shown_whole_on_a_terminal_and_in_a_pipe(terminal: bool) -> None:
    stream = io.StringIO()
    print_plan(plan(), 2, Console(file=stream, force_terminal=terminal, width=200, no_color=True))
    shown = stream.getvalue()
    assert "concat(s:a[4:8], s:a[0:4])" in shown and "96 B" in shown
    assert "1 tensors" in shown and "dropped: s:b (a buffer)" in shown


def test_long_expressions_are_shortened_in_the_middle() -> None:
    parts = tuple(Take("s", f"x{i}") for i in range(100))
    assert describe(Concat(parts)) == "concat(s:x0, s:x1, ... 97 more ..., s:x99)"


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_bytes_for_people(count: int, shown: str) -> None:
    assert human_bytes(count) == shown


def test_quick_work_is_silent_and_slow_work_tells_each_tenth(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.byte_progress(1000, "mix") as advance:
        for _ in range(100):
            advance(10)
    assert capsys.readouterr().err == ""
    clock = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.byte_progress(1000, "mix") as advance:
        for _ in range(100):
            advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9 and lines[-1].startswith("mix: 900 B of 1000 B")  # none at the end
