"""A rank that fails, is lost or hangs ends the job, and one line says what came first."""

from __future__ import annotations

import errno
import faulthandler
import json
import signal
import threading
import time
from pathlib import Path

import pytest
from btx_testing.commands import CommandServer, Ended
from btx_testing.runs import TinyWorld, saved_step, weights

from btx_nemo.errors import RankFailed, UserError
from btx_nemo.train import failure
from btx_nemo.train.hang import CODE, HangDetector

STEP = "btx_nemo.train.run:train_step:6"


def start(world: TinyWorld, commands: CommandServer, out: Path, before: str, **options: object) -> list[Ended]:
    """Two ranks, on the second of which something happens in step 6."""
    arguments = world.arguments("tiny_mix", out, layout__ep=2, **options)
    order = f"btx_testing.death:on_rank?1 {before} {STEP}"
    return [rank.wait() for rank in commands.start_ranks(2, *arguments, before=order)]


def lines(ends: list[Ended]) -> list[str]:
    return [line for ended in ends for line in ended.err.splitlines() if line.startswith("btx-nemo train:")]


def cause(out: Path) -> dict:
    return json.loads((out / "failure.json").read_text())


def test_a_killed_rank_is_told_by_another(
    world: TinyWorld, commands: CommandServer, whole_pair: Path, tmp_path: Path
) -> None:
    """It dies where the other waits for it in a collective; the run resumes to the same bits."""
    out = tmp_path / "run"
    first, second = start(world, commands, out, "at")
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    (line,) = lines([first, second])
    assert "rank 0 on " in line and "after step 5: another rank was lost" in line
    assert "Traceback" not in first.err and "Traceback" in (out / "failure-rank-0.txt").read_text()
    assert cause(out)["rank"] == 0
    assert saved_step(out) == 4
    for ended in commands.run_ranks(2, *world.arguments("tiny_mix", out, layout__ep=2)):
        assert ended.code == 0, ended.err
    assert weights(out) == weights(whole_pair)
    assert not list(out.glob("failure*"))


def test_a_bug_on_one_rank_is_told_once(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """By the rank that has it, with the traceback in a file; the other, which loses it, is silent."""
    out = tmp_path / "run"
    ends = start(world, commands, out, "raise_at")
    assert [ended.code for ended in ends] == [1, 1]
    (line,) = lines(ends)
    assert line in ends[1].err
    assert "rank 1 on " in line and "after step 5: ZeroDivisionError: a bug that a test put here" in line
    assert "raise ZeroDivisionError" in (out / "failure-rank-1.txt").read_text()
    assert cause(out)["rank"] == 1
    assert saved_step(out) == 4


def test_a_hang_ends_the_run(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """With one line, the stacks of all threads, and a code that is not 0."""
    out = tmp_path / "run"
    ends = start(world, commands, out, "hang_at", robust__hang_seconds=6)
    assert {ended.code for ended in ends} in ({CODE}, {CODE, 1})
    (line,) = lines(ends)
    assert "after step 5 (robust.hang_seconds=6)" in line
    hung = out / f"hang-rank-{cause(out)['rank']}.txt"
    assert "in steps" in hung.read_text() and "in _watch" in hung.read_text()
    assert saved_step(out) == 4


@pytest.mark.parametrize(
    ("error", "ranks", "kind", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"),
            2,
            UserError,
            "metrics.jsonl: No space left",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 1, UserError, "{out}: Disk quota exceeded; free space and run"),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), 2, RankFailed, "after step 5: TimeoutError: "),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 2, RankFailed, "after step 5: BrokenPipeError: "),
        (RuntimeError("Connection closed by peer"), 1, RankFailed, "after step 5: RuntimeError: "),
        (RuntimeError("Connection closed by peer"), 2, RankFailed, "after step 5: another rank was lost"),
    ],
)
def test_only_what_a_collective_says_is_a_lost_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, ranks: int, kind: type, said: str
) -> None:
    monkeypatch.setattr(failure, "PATIENCE", 0.1)
    with pytest.raises(kind) as raised, failure.first_cause(tmp_path, 0, ranks, lambda: "step 5"):
        raise error
    assert said.replace("{out}", str(tmp_path)) in str(raised.value)
    assert cause(tmp_path)["rank"] == 0


def test_leaving_the_watch_leaves_no_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the watching thread was just about to set it again."""
    calls, arming = [], threading.Event()

    def arm(*_: object, **__: object) -> None:
        arming.set()
        time.sleep(0.2)
        calls.append("armed")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    with HangDetector(tmp_path, 0, 4):
        assert arming.wait(10)
    assert calls == ["armed", "cancelled"]


@pytest.mark.slow
def test_a_slow_run_is_no_hang(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """Twelve steps take longer than the limit, none of them does."""
    before = "btx_testing.death:slow_steps?0.7"
    ended = commands.run(*world.arguments("tiny_expert", tmp_path / "run", robust__hang_seconds=6), before=before)
    assert ended.code == 0, ended.err
