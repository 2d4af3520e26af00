"""Steps without a finite loss or gradient change nothing, are counted and told, and end a run that has too many."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import signal
from pathlib import Path

import pytest
from btx_testing.commands import CommandServer, ok
from btx_testing.pool import RankPool
from btx_testing.runs import TinyWorld, metrics, saved_step, weights
from btx_testing.train_jobs import around_a_poisoned_step

from btx_nemo.config.schema import RobustConfig
from btx_nemo.train.step import StepResult
from btx_nemo.train.watch import Watch, batch_ids, spike

POISON = "btx_testing.death:poison_at?"


def skipped(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "skipped_batches.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("model", "layout", "what"),
    [
        pytest.param("dense", {}, "loss", id="dp2-loss"),
        pytest.param("dense", {}, "gradient", id="dp2"),
        pytest.param("dense", {"tp": 2}, "gradient", id="tp2"),
        pytest.param("dense", {"pp": 2}, "gradient", id="pp2"),
        pytest.param("mixture", {"ep": 2}, "gradient", id="ep2"),
    ],
)
def test_a_skipped_step_changes_nothing_on_any_rank(
    world: TinyWorld, ranks: RankPool, model: str, layout: dict[str, int], what: str
) -> None:
    """The second rank alone sees it; all agree, and the next step is as if there had been none."""
    found = ranks.run(around_a_poisoned_step, str(getattr(world, model)), layout, 1, what, ranks=2)
    for facts in found:
        assert not facts["ok"] and not facts["finite"]
        assert math.isfinite(facts["loss"]) == (what == "gradient")
        assert facts["before"] == facts["after"]
        assert facts["end"] == facts["calm"] != facts["before"]


@pytest.mark.parametrize(("model", "layout"), [("dense", {}), ("mixture", {"ep": 2}), ("dense", {"pp": 2})])
def test_a_batch_without_a_target_changes_nothing(
    world: TinyWorld, ranks: RankPool, model: str, layout: dict[str, int]
) -> None:
    """No momentum and no decay either, and the next step is as if there had been none."""
    for facts in ranks.run(around_a_poisoned_step, str(getattr(world, model)), layout, 1, "targets", ranks=2):
        assert not facts["ok"] and facts["empty"]
        assert facts["before"] == facts["after"]
        assert facts["end"] == facts["calm"] != facts["before"]


def test_a_skipped_step_is_told_and_the_run_goes_on(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """On two ranks, of which the second sees it; a run killed after it and resumed is the same."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    options = {"domain": "null", "layout__tp": 1}
    arguments = world.arguments("tiny_expert", whole, **options)
    ends = [rank.wait() for rank in commands.start_ranks(2, *arguments, before=f"{POISON}6,7@1")]
    assert [ended.code for ended in ends] == [0, 0], ends[0].err
    assert "step 6 skipped, 1 in a row" in ends[0].err and "step 7 skipped, 2 in a row" in ends[0].err
    assert ends[1].err == ""
    steps = [record for record in metrics(whole) if "loss" in record]
    assert [record["step"] for record in steps if record["skipped"]] == [6, 7]
    assert steps[5]["lr"] == steps[6]["lr"] == steps[7]["lr"] != steps[8]["lr"]  # the schedule waited
    assert steps[0]["domain_loss"] and set(steps[0]["domain_loss"]) <= {"math", "code"}

    arguments = world.arguments("tiny_expert", out, **options)
    killed = commands.start_ranks(2, *arguments, before="btx_testing.death:poisoned_and_killed?6,7@1/10")
    assert {rank.wait().code for rank in killed} == {-signal.SIGKILL}
    assert saved_step(out) == 8
    for rank in commands.start_ranks(2, *arguments, before=f"{POISON}6,7@1"):
        ok(rank.wait())
    assert weights(out) == weights(whole)
    assert metrics(out) == metrics(whole)
    assert skipped(out) == skipped(whole)


def test_too_many_in_a_row_end_the_run(world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path) -> None:
    """Code 1, one line, the batches in a file, the last checkpoint as it was; where it was chance, it goes on."""
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out, robust__max_skipped=2)
    ended = commands.run(*arguments, before=f"{POISON}5,6,7")
    assert ended.code == 1
    (line,) = [line for line in ended.err.splitlines() if line.startswith("btx-nemo")]
    assert "training broke down at step 7" in line and "step_00000004" in line
    assert saved_step(out) == 4
    assert [record["step"] for record in skipped(out)] == [5, 6, 7]
    ok(commands.run(*arguments))
    assert weights(out) == weights(whole)
    assert metrics(out) == metrics(whole)


def test_the_batches_are_those_that_were_trained_on(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """The steps' samples, by their numbers, in the blend."""
    out = tmp_path / "run"
    ended = commands.run(*world.arguments("tiny_mix", out, robust__max_skipped=0), before=f"{POISON}2")
    assert ended.code == 1
    (record,) = skipped(out)
    assert [sample["sample"] for sample in record["samples"]] == [4, 5, 6, 7]
    assert {sample["domain"] for sample in record["samples"]} == {"math", "code"}
    assert all(sample["documents"] for sample in record["samples"])


@pytest.mark.usefixtures("one_rank")
def test_the_documents_named_are_those_that_a_sample_is_cut_from(world: TinyWorld, tmp_path: Path) -> None:
    """Its tokens are one piece of them, from the first of them to the last."""
    import numpy as np

    from btx_nemo.data.datasets import build_datasets
    from btx_nemo.data.indexed import open_indexed

    blend = {"math": 1.0, "code": 1.0}
    train, _ = build_datasets(world.data, blend, seq_length=300, train_samples=24, cache_dir=tmp_path)
    several = 0
    for number, sample in enumerate(batch_ids(train, list(blend), range(24))):
        assert sample["sample"] == number
        indexed = open_indexed(world.data / sample["domain"] / "train")
        documents = [indexed.document(document) for document in sample["documents"]]
        text = np.concatenate(documents)
        item = train[number]
        piece = np.append(item["tokens"].numpy(), item["labels"].numpy()[-1])
        begins = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(text, len(piece)) == piece).all(axis=1))
        longest, shortest = len(documents[0]), len(text) - len(documents[-1])
        assert any(begin < longest and begin + len(piece) > shortest for begin in begins), sample
        several += len(documents) > 1
    assert several


def result(loss: float, grad_norm: float = 1.0, ok: bool = True) -> StepResult:
    return StepResult(loss=loss, grad_norm=grad_norm, ok=ok, lr=1.0)


def test_only_steps_in_a_row_count() -> None:
    watch = Watch(RobustConfig(max_skipped=1))
    for loss, broken in ((math.nan, False), (1.0, False), (math.inf, False), (math.nan, True)):
        watch.see(result(loss, ok=False))
        assert watch.broken == broken
    again = Watch(RobustConfig(max_skipped=1))
    again.load_state(json.loads(json.dumps(watch.state())))
    assert again == watch


def test_batches_without_a_target_are_no_fault() -> None:
    """They neither count nor end a row of steps that do, and are in no window."""
    watch = Watch(RobustConfig(max_skipped=1))
    watch.see(result(math.nan, ok=False))
    for _ in range(5):
        assert watch.see(dataclasses.replace(result(math.nan, ok=False), empty=True)) is None
    assert watch.skipped == 1 and not watch.broken and not watch.losses


def test_a_spike_is_one_among_noise() -> None:
    """Of losses that fall with noise, only the ones put in; and not before a quarter of the window is there."""
    rng, robust = random.Random(0), RobustConfig()
    watch, found = Watch(robust), []
    for step in range(400):
        loss = 2 + 8 * math.exp(-step / 60) + rng.gauss(0, 0.05)
        loss += 3 if step in (5, 200, 390) else 0
        if watch.see(result(loss)) is not None:
            found.append(step)
    assert found == [200, 390]
    assert len(watch.losses) == robust.spike_window


def test_a_flat_loss_has_no_spikes_of_nothing() -> None:
    assert spike([2.0] * 64, 2.0001, RobustConfig()) is None
    assert spike([2.0] * 64, 3.0, RobustConfig()) == pytest.approx(50)
    assert spike([2.0] * 64, 3.0, RobustConfig(spike_zscore=0)) is None
