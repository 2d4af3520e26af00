"""fp16 with Megatron's dynamic loss scale: what is skipped, what a skipped step leaves alone, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from btx_testing import train_jobs
from btx_testing.commands import CommandServer
from btx_testing.pool import RankPool
from btx_testing.runs import TinyWorld, metrics, weights

HUGE = {"loss_scale": {"initial": 2.0**40, "hysteresis": 1, "window": 3}}


@pytest.mark.parametrize(("kind", "layout", "count"), [("dense", {}, 1), ("mixture", {"tp": 2, "ep": 2}, 2)])
def test_a_step_that_overflows_is_skipped_and_halves_the_scale(
    ranks: RankPool, world: TinyWorld, kind: str, layout: dict[str, int], count: int
) -> None:
    """Neither the weights nor the schedule move; the scale falls until the gradients fit, then grows again."""
    options = {**HUGE, "lr": 1e-3, "warmup_steps": 4, "decay": "constant"}
    model: Path = getattr(world, kind)
    results = ranks.run(train_jobs.loss_scales, str(model), layout, options, 30, [], ranks=count)
    taken, scale = 0, 2.0**40
    grown = clean = 0
    for number, step in enumerate(results[0]):
        assert step["moved"] == (step["ok"] and taken > 0)  # the first step of a warm-up has a rate of zero
        assert step["lr"] == pytest.approx(1e-3 * min(taken, 4) / 4)
        clean = clean + 1 if step["ok"] else 0
        if not step["ok"]:
            scale /= 2
        elif clean == 3:
            scale, clean, grown = scale * 2, 0, grown + 1
        assert step["scales"] == [scale] * (2 if kind == "mixture" else 1), number
        taken += step["ok"]
    assert not results[0][0]["ok"]
    assert 5 < taken < 30
    assert grown
    for other in results[1:]:
        assert [(s["ok"], s["scales"]) for s in other] == [(s["ok"], s["scales"]) for s in results[0]]


def test_experts_and_the_rest_keep_one_scale(ranks: RankPool, world: TinyWorld) -> None:
    """Only the experts' gradients overflow, in the third step; Megatron by itself would lower only their scale."""
    options = {"loss_scale": {"initial": 256.0, "hysteresis": 1}, "lr": 1e-3}
    (found,) = ranks.run(train_jobs.loss_scales, str(world.mixture), {}, options, 4, [2], ranks=1)
    assert [step["ok"] for step in found] == [True, True, False, True]
    assert [step["scales"] for step in found] == [[256.0, 256.0]] * 2 + [[128.0, 128.0]] * 2


def test_fp16_follows_fp32(ranks: RankPool, world: TinyWorld) -> None:
    """Each precision learns, and its loss falls by as much as that of fp32."""
    losses: dict[str, Any] = {}
    for precision in ("fp32", "fp16", "bf16"):
        options = {"precision": precision, "lr": 3e-3, "loss_scale": {"initial": 1024.0}}
        losses[precision] = ranks.run(train_jobs.losses, str(world.mixture), {}, options, 5, ranks=1)[0]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=2e-3)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    falls = {precision: found[0] - found[-1] for precision, found in losses.items()}
    assert min(falls.values()) > 0.05
    assert falls["fp16"] == pytest.approx(falls["fp32"], rel=0.05), falls
    assert falls["bf16"] == pytest.approx(falls["fp32"], rel=0.2), falls


def test_a_resumed_run_has_the_scale_it_was_stopped_with(
    world: TinyWorld, commands: CommandServer, tmp_path: Path
) -> None:
    """Stopped while the scale still falls."""
    options = {
        "precision": "fp16",
        "loss_scale__initial": 2.0**20,
        "loss_scale__window": 3,
        "loss_scale__hysteresis": 1,
    }
    options |= {"steps": 14, "checkpoint__every": 0, "optim__schedule_unit": "samples", "optim__warmup_steps": 10}
    ended = commands.run(*world.arguments("tiny_mix", tmp_path / "whole", **options))
    assert ended.code == 0, ended.err
    arguments = world.arguments("tiny_mix", tmp_path / "run", **options)
    ended = commands.run(*arguments, before="btx_testing.death:usr1_at?btx_nemo.train.run:train_step:5")
    assert ended.code == 75, ended.err
    ended = commands.run(*arguments)
    assert ended.code == 0, ended.err
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    skipped = [record["skipped"] for record in metrics(tmp_path / "run") if "skipped" in record]
    assert any(skipped[:4])
    assert any(skipped[5:])
    assert not all(skipped)


def test_gradients_that_overflow_at_the_least_scale_are_told(ranks: RankPool, world: TinyWorld) -> None:
    """So that a run of them ends by `robust.max_skipped`, and does not go on for ever."""
    options = {"loss_scale": {"initial": 4.0, "min": 2.0, "hysteresis": 1}, "lr": 1e-3}
    (found,) = ranks.run(train_jobs.loss_scales, str(world.mixture), {}, options, 6, [1, 2, 3], ranks=1)
    assert [step["ok"] for step in found] == [True, False, False, False, True, True]
    assert [step["scales"][0] for step in found] == [4.0] + [2.0] * 5
    assert [step["finite"] for step in found] == [True, False, False, False, True, True]
