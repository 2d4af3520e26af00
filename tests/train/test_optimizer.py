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


def scheduled(step: int, lr: float, min_lr: float, warmup: int, total: int, decay: str) -> float:
    """Learning rate of optimizer step number `step` (from 0): linear warm-up from 0, then the decay to `min_lr`."""
    if step <= warmup and warmup:
        return lr * step / warmup
    share = (step - warmup) / (total - warmup)
    factor = {"cosine": 0.5 * (1 + math.cos(math.pi * share)), "linear": 1 - share, "constant": 1.0}[decay]
    return min_lr + factor * (lr - min_lr)


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_schedule_follows_its_formula(ranks: RankPool, world: TinyWorld, decay: str, warmup: int) -> None:
    options = {"lr": 2e-3, "min_lr": 1e-4, "warmup_steps": warmup, "decay": decay, "steps": 8}
    (rates,) = ranks.run(train_jobs.learning_rates, str(world.dense), options, 8, ranks=1)
    expected = [scheduled(step, 2e-3, 1e-4, warmup, 8, decay) for step in range(9)]
    assert rates == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"weight_decay": 0.5, "clip_grad": 0.0}, id="decay"),
        pytest.param({"weight_decay": 0.0, "clip_grad": 0.01, "eps": 1e-3}, id="clip"),
        pytest.param({"weight_decay": 0.1, "clip_grad": 1e9, "beta1": 0.5, "beta2": 0.7}, id="betas"),
    ],
)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_steps_are_those_of_adamw(ranks: RankPool, world: TinyWorld, kind: str, options: dict[str, Any]) -> None:
    """Norms have no weight decay, all else has; gradients are scaled down to the largest norm."""
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
            decay = 0.0 if "norm" in name else options["weight_decay"]
            update = (m / (1 - beta1**number)) / ((v / (1 - beta2**number)).sqrt() + options.get("eps", 1e-8))
            expected = p - step["lr"] * (decay * p + update)
            torch.testing.assert_close(step["after"][name].double(), expected, atol=2e-6, rtol=1e-5, msg=name)
