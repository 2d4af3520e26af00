"""Twenty runs killed at random moments, most of them while a checkpoint is being written, end as one that never was."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from btx_testing.commands import CommandServer, Ended, Running
from btx_testing.runs import TinyWorld, metrics, saved_step, weights
from btx_testing.tensors import temporaries

pytestmark = pytest.mark.slow
SEED = 7


def run(world: TinyWorld, commands: CommandServer, out: Path, ranks: int, **options: Any) -> list[Ended]:
    ends = commands.run_ranks(ranks, *arguments(world, out, **options))
    assert [ended.code for ended in ends] == [0] * ranks, ends[0].err
    return ends


def arguments(world: TinyWorld, out: Path, **options: Any) -> list[str]:
    """A checkpoint after each step: more of the time goes into them than into the steps."""
    return world.arguments("tiny_mix", out, **{"checkpoint__every": 1, "checkpoint__keep": 2, **options})


def code_of(process: Running) -> int:
    """Of a rank that ends by itself, or as a launcher would end it: it may still wait for the others to come up."""
    try:
        return process.wait(timeout=30).code
    except TimeoutError:
        return -signal.SIGKILL


@pytest.mark.parametrize(
    ("ranks", "runs", "number", "options"),
    [
        pytest.param(1, 7, signal.SIGKILL, {}, id="sigkill"),
        pytest.param(1, 8, signal.SIGKILL, {"checkpoint__asynchronous": True}, id="sigkill-asynchronous"),
        pytest.param(2, 5, signal.SIGKILL, {"checkpoint__asynchronous": True, "layout__ep": 2}, id="a-rank-of-two"),
        pytest.param(1, 2, signal.SIGTERM, {"checkpoint__asynchronous": True}, id="sigterm-asynchronous"),
        pytest.param(2, 2, signal.SIGUSR1, {"layout__tp": 2}, id="sigusr1-to-a-rank-of-two"),
    ],
)
def test_signals_at_random_moments(
    world: TinyWorld,
    commands: CommandServer,
    tmp_path: Path,
    ranks: int,
    runs: int,
    number: signal.Signals,
    options: dict[str, Any],
) -> None:
    """A rank gets the signal at a moment drawn from the time of a whole run; the same command then goes on."""
    rng, whole = random.Random(SEED), tmp_path / "whole"
    began = time.monotonic()
    run(world, commands, whole, ranks, **options)
    duration, hit, saving = time.monotonic() - began, 0, 0
    for attempt in range(runs):
        out = tmp_path / f"run-{attempt}"
        started = commands.start_ranks(ranks, *arguments(world, out, **options))
        time.sleep(rng.uniform(0.2, 0.8) * duration)
        started[rng.randrange(ranks)].kill(number)
        codes = [code_of(process) for process in started]
        if codes != [0] * ranks:  # it may have been at the end
            hit += 1
            assert set(codes) <= {-signal.SIGKILL, 1} | (set() if number == signal.SIGKILL else {75, -number})
            assert not (out / "DONE").exists()
            saving += bool((out / "checkpoints").is_dir() and temporaries(out / "checkpoints"))
            if 75 in codes:
                assert saved_step(out) > 0
        run(world, commands, out, ranks, **options)
        assert weights(out) == weights(whole), (attempt, codes)
        assert metrics(out) == metrics(whole), (attempt, codes)
        assert temporaries(out) == temporaries(out / "checkpoints") == []
        assert len(list((out / "checkpoints").iterdir())) == 2
    print(f"{hit} of {runs} were hit, {saving} while saving")
    assert hit > runs // 2
    assert saving or number != signal.SIGKILL
