"""Progress without a terminal: sparse lines while work goes on, none when it ends."""

from __future__ import annotations

import itertools

import pytest

from btx_nemo.plan import progress


def test_slow_work_says_each_tenth_but_not_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(step=5)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    for total, lines in ((100, 9), (1, 0), (0, 0)):
        with progress.byte_progress(total, "work") as advance:
            for _ in range(total):
                advance(1)
            advance(0)
        assert capsys.readouterr().err.count("\n") == lines
