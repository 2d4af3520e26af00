"""AdamW, its schedule, weight decay and clipping against a hand-written AdamW."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import train_jobs
from btx_testing.pool import RankPool
from btx_testing.runs import TinyWorld

ANNEAL = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "exponential": lambda x: 2 * 0.5**x - 1,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}


def scheduled(at: float, peak: float, least: float, warmup: float, end: float, decay: str, **wsd: Any) -> float:
    """Learning rate after `at` of anything: linear warm-up from 0, then the decay to `least` at `end`."""
    if at <= warmup and warmup:
        return peak * at / warmup
    if decay == "constant":
        return peak
    if at >= end:
        return least
    if decay == "wsd":
        begin = end - wsd["anneal_steps"]
        factor = 1.0 if at <= begin else ANNEAL[wsd["anneal"]]((at - begin) / wsd["anneal_steps"])
    else:
        factor = ANNEAL[decay]((at - warmup) / (end - warmup))
    return least + factor * (peak - least)


@pytest.mark.parametrize(
    "schedule",
    [
        *({"decay": decay, "warmup_steps": warmup} for decay in ("cosine", "linear", "constant") for warmup in (0, 3)),
        *({"decay": "wsd", "anneal_steps": 4, "anneal": anneal, "warmup_steps": 2} for anneal in ANNEAL),
        {"decay": "wsd", "anneal_steps": 8},
        {"decay": "cosine", "decay_steps": 5, "warmup_steps": 2},
        {"decay": "linear", "decay_steps": 16},
        # a step is two sequences of sixteen tokens
        {"decay": "cosine", "schedule_unit": "samples", "warmup_steps": 5},
        {"decay": "linear", "schedule_unit": "samples", "warmup_steps": 3, "decay_steps": 11},
        {"decay": "cosine", "schedule_unit": "tokens", "warmup_steps": 70, "decay_steps": 200},
        {"decay": "wsd", "schedule_unit": "tokens", "warmup_steps": 40, "anneal_steps": 100, "anneal": "cosine"},
    ],
    ids=lambda schedule: "-".join(map(str, schedule.values())),
)
def test_the_schedule_follows_its_formula(ranks: RankPool, world: TinyWorld, schedule: dict[str, Any]) -> None:
    """At every step of eight and the one after, of the model and, on its own rates, of the routers."""
    options = {"lr": 2e-3, "min_lr": 1e-4, "router_lr": 5e-2, "router_min_lr": 1e-2, "steps": 8, **schedule}
    (rates,) = ranks.run(train_jobs.learning_rates, options, 8, ranks=1)
    unit = {"steps": 1, "samples": 2, "tokens": 32}[schedule.get("schedule_unit", "steps")]
    warmup, end = schedule.get("warmup_steps", 0), schedule.get("decay_steps", 8 * unit)
    wsd = {key: schedule.get(key, "linear") for key in ("anneal_steps", "anneal")}
    for (peak, least), found in zip(((2e-3, 1e-4), (5e-2, 1e-2)), rates, strict=True):
        expected = [
            scheduled(step * unit, peak, least, warmup, end, schedule["decay"], **wsd) for step in range(len(found))
        ]
        assert len(found) == 9
        assert found == pytest.approx(expected, rel=1e-9)


def test_every_step_of_a_training_moves_the_schedule(ranks: RankPool, world: TinyWorld) -> None:
    """By one step each, of a model that really trains."""
    options = {"lr": 2e-3, "min_lr": 1e-4, "steps": 8, "decay": "cosine", "warmup_steps": 3}
    (found,) = ranks.run(train_jobs.rates, str(world.mixture), options, 8, ranks=1)
    assert found == pytest.approx([scheduled(step, 2e-3, 1e-4, 3, 8, "cosine") for step in range(8)], rel=1e-9)


ROUTERS = {f"decoder.layers.{i}.mlp.router.weight" for i in (0, 1)}


@pytest.mark.parametrize(
    ("layout", "count", "options", "router", "rest"),
    [
        pytest.param({}, 1, {}, (1e-3, 0.0), 1e-3, id="defaults"),
        pytest.param({}, 1, {"decay_routers": True}, (1e-3, 0.5), 1e-3, id="decayed"),
        pytest.param({"tp": 2, "ep": 2}, 2, {"router_lr": 4e-3}, (4e-3, 0.0), 1e-3, id="own-rate"),
        pytest.param({"pp": 2}, 2, {"router_lr": 4e-3, "decay_routers": True}, (4e-3, 0.5), 1e-3, id="both"),
    ],
)
def test_each_parameter_is_in_its_group(
    ranks: RankPool,
    world: TinyWorld,
    layout: dict[str, int],
    count: int,
    options: dict[str, Any],
    router: tuple[float, float],
    rest: float,
) -> None:
    """Routers have their rate, and like norms and biases no decay unless it is asked for."""
    options = {"lr": 1e-3, "decay": "constant", "weight_decay": 0.5, **options}
    groups: dict[str, tuple[float, float]] = {}
    for found in ranks.run(train_jobs.parameter_groups, str(world.mixture), layout, options, ranks=count):
        groups |= {name: tuple(group) for name, group in found.items()}
    assert set(groups) > ROUTERS
    for name, group in groups.items():
        expected = router if name in ROUTERS else (rest, 0.0 if "norm" in name else 0.5)
        assert group == pytest.approx(expected), name


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"weight_decay": 0.5, "clip_grad": 0.0}, id="decay"),
        pytest.param({"weight_decay": 0.5, "clip_grad": 0.0, "decay_routers": True}, id="decayed-routers"),
        pytest.param({"weight_decay": 0.0, "clip_grad": 0.01, "eps": 1e-3}, id="clip"),
        pytest.param({"weight_decay": 0.1, "clip_grad": 1e9, "beta1": 0.5, "beta2": 0.7}, id="betas"),
    ],
)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_steps_are_those_of_adamw(ranks: RankPool, world: TinyWorld, kind: str, options: dict[str, Any]) -> None:
    """Norms and routers have no weight decay, all else has; gradients are scaled down to the largest norm."""
    model: Path = getattr(world, kind)
    (steps,) = ranks.run(train_jobs.adam_trace, str(model), {"lr": 1e-2, **options}, 3, ranks=1)
    beta1, beta2 = options.get("beta1", 0.9), options.get("beta2", 0.95)
    moments = {name: (torch.zeros_like(v).double(),) * 2 for name, v in steps[0]["before"].items()}
    for number, step in enumerate(steps, start=1):
        norm = torch.stack([g.double().square().sum() for g in step["gradients"].values()]).sum().sqrt().item()
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
        limit = options["clip_grad"]
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for name, before in step["before"].items():
            g, p = scale * step["gradients"][name].double(), before.double()
            m, v = moments[name]
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            moments[name] = (m, v)
            decays = "norm" not in name and ("router" not in name or options.get("decay_routers"))
            decay = options["weight_decay"] if decays else 0.0
            update = (m / (1 - beta1**number)) / ((v / (1 - beta2**number)).sqrt() + options.get("eps", 1e-8))
            expected = p - step["lr"] * (decay * p + update)
            torch.testing.assert_close(step["after"][name].double(), expected, atol=2e-6, rtol=1e-5, msg=name)
