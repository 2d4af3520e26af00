"""What a run shows beside metrics.jsonl: the same numbers in TensorBoard and Weights & Biases, and how busy it is."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from btx_testing.commands import CommandServer
from btx_testing.runs import TinyWorld

from btx_nemo.config.schema import DataConfig, LogConfig, OptimConfig, TrainConfig
from btx_nemo.errors import EnvironmentLacks, UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.train import throughput
from btx_nemo.train.throughput import Throughput, peak_flops
from btx_nemo.train.track import Trackers, check_log, scalars


def config(**log: Any) -> TrainConfig:
    return TrainConfig(
        stage="expert",
        out="unused",
        data=DataConfig(path="unused", seq_length=16),
        steps=1,
        micro_batch_size=1,
        global_batch_size=1,
        optim=OptimConfig(lr=1e-3),
        precision="bf16",
        log=LogConfig(**log),
    )


def test_tensorboard_has_the_numbers_of_metrics(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """Also after a stop and a restart: each step once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    arguments = world.arguments("tiny_mix", out, log__tensorboard=True, steps=6, checkpoint__every=3)
    stopped = commands.run(*arguments, before="btx_testing.death:at?btx_nemo.train.run:train_step:6")
    assert stopped.code == -9
    ended = commands.run(*arguments)
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    accumulator = EventAccumulator(str(out / "tensorboard"))
    accumulator.Reload()
    for tag, pick in (
        ("loss", lambda r: r.get("loss")),
        ("valid/math", lambda r: r.get("valid", {}).get("math")),
        ("domain_loss/code", lambda r: r.get("domain_loss", {}).get("code")),
        ("router_losses/btx/layer_1", lambda r: r["router_losses"]["btx"][1] if "router_losses" in r else None),
    ):
        expected = {r["step"]: pick(r) for r in records if pick(r) is not None}
        events = accumulator.Scalars(tag)
        assert [event.step for event in events] == sorted(expected)
        assert {event.step: event.value for event in events} == pytest.approx(expected, rel=1e-6)


def test_a_run_that_starts_anew_has_no_points_of_before(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (3, 1):
        trackers = Trackers(config(tensorboard=True), tmp_path, resumed_at=0, warn=pytest.fail)
        for step in range(1, steps + 1):
            trackers.write({"step": step, "loss": float(steps)})
        trackers.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("loss")] == [(1, 1.0)]


def stand_in(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """A module `wandb` of these functions."""
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_weights_and_biases_gets_the_settings_and_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in; the same id after a restart."""
    made, logged = [], []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    stand_in(monkeypatch, init=lambda **settings: made.append(settings) or run)
    for _ in range(2):
        settings = config(wandb={"project": "btx", "mode": "offline"})
        trackers = Trackers(settings, tmp_path, resumed_at=0, warn=pytest.fail)
        trackers.write({"step": 3, "loss": 1.5, "valid": {"math": 2.0}})
        trackers.close()
    assert logged == [(3, {"loss": 1.5, "valid/math": 2.0})] * 2
    assert [settings["project"] for settings in made] == ["btx", "btx"]
    assert made[0]["id"] == made[1]["id"] == (tmp_path / "wandb_id").read_text() and made[0][
        "config"
    ] == dataclasses.asdict(settings)


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """With one warning, and never the run."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network")

    functions = {name: fail if name == where else (lambda *_, **__: None) for name in ("log", "finish")}
    run = types.SimpleNamespace(**functions)
    stand_in(monkeypatch, init=fail if where == "init" else (lambda **_: run))
    warnings: list[str] = []
    trackers = Trackers(config(wandb={"project": "btx"}), tmp_path, resumed_at=0, warn=warnings.append)
    for step in (1, 2):
        trackers.write({"step": step, "loss": 1.0})
    trackers.close()
    assert len(warnings) == 1 and "ConnectionError: no network" in warnings[0]


def test_a_tracker_that_is_not_installed_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for log, key in (({"tensorboard": True}, "log.tensorboard"), ({"wandb": {"project": "x"}}, "log.wandb")):
        with pytest.raises(EnvironmentLacks, match=key):
            check_log(config(**log))
    check_log(config())


def test_scalars_leave_tables_out() -> None:
    record = {"loss": 1, "skipped": False, "load": [[0.5]], "entropy": [0.25], "text": "x", "none": None}
    assert dict(scalars(record)) == {"loss": 1.0, "skipped": 0.0, "entropy/layer_0": 0.25}


def test_utilisation_counts_what_the_architecture_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture's FLOPs are those of its active experts; by hand, of a model with one layer."""
    model = ModelConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        num_query_groups=1,
        head_dim=4,
        vocab_size=32,
        moe=MoEConfig(num_experts=4, top_k=2),
    )
    attention = 8 * (8 + 4 + 4) + 8 * 8  # queries, keys, values; output
    experts = 2 * 3 * 8 * 16
    per_token = 6 * (attention + experts + 32 * 8) + 6 * 16 * 8  # the last: scores over half of 16 tokens, and sums
    facts = Throughput(config(peak_flops=1e6), model, ranks=2).record(10.0)
    assert facts["flops_per_second"] == per_token * 10 / 2
    assert facts["flops_utilization"] == pytest.approx(per_token * 10 / 2 / 1e6, abs=1e-4)
    assert facts["memory_bytes"] > 1e7  # type: ignore[operator]
    assert Throughput(config(), model, ranks=2).record(10.0)["flops_utilization"] is None  # a CPU's is unknown


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("Some GPU", None),
    ],
)
def test_peak_by_name(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(throughput, "device_name", lambda: name)
    assert peak_flops(config()) == peak
    assert peak_flops(config(peak_flops=5e12)) == 5e12
    with pytest.raises(UserError, match=r"log\.peak_flops=0\.0"):
        check_log(config(peak_flops=0.0))
