"""Dropout: where it is, what share it takes, and that no layout changes it (see also tests/routers/test_parity.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import router_jobs
from btx_testing.jobs import random_batch
from btx_testing.pool import RankPool
from btx_testing.runs import VOCAB, TinyWorld

BATCH = random_batch(VOCAB, total=4, length=32)


def test_activations_are_dropped_before_the_down_projection_in_training_alone(
    ranks: RankPool, world: TinyWorld
) -> None:
    (found,) = ranks.run(router_jobs.dropout, str(world.mixture), BATCH, {"dropout": {"expert": 0.4}}, ranks=1)
    kept = found["with"] != 0
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.03)
    assert kept.float().mean(0).min() > 0.4 and kept.float().mean(1).min() > 0.3  # no token and no channel as a whole
    torch.testing.assert_close(found["with"], found["without"] * kept / 0.6)
    assert torch.equal(found["evaluation with"], found["evaluation without"])
    assert found["valid with"] == found["valid without"]


def test_hidden_dropout_changes_training_alone(ranks: RankPool, world: TinyWorld) -> None:
    (found,) = ranks.run(router_jobs.dropout, str(world.mixture), BATCH, {"dropout": {"hidden": 0.1}}, ranks=1)
    assert not torch.equal(found["with"], found["without"])
    assert found["valid with"] == found["valid without"]


@pytest.mark.parametrize(
    ("layout", "count"), [({"tp": 2}, 2), ({"ep": 4}, 4), ({"tp": 2, "ep": 4}, 4)], ids=["tp2", "ep4", "tp2-ep4-dp2"]
)
def test_masks_are_the_same_where_experts_lie_otherwise(
    ranks: RankPool, world: TinyWorld, layout: dict[str, int], count: int
) -> None:
    losses: dict[str, list[float]] = {}
    for name, dropout in (("without", {}), ("with", {"hidden": 0.1, "expert": 0.4})):
        options: dict[str, Any] = {"dropout": dropout, "steps": 2}
        (alone,) = ranks.run(router_jobs.steps, str(world.mixture), {}, BATCH, options, ranks=1)
        results = ranks.run(router_jobs.steps, str(world.mixture), layout, BATCH, options, ranks=count)
        assert all(result["losses"] == pytest.approx(alone["losses"], rel=1e-5) for result in results)
        assert all(result["norms"] == pytest.approx(alone["norms"], rel=1e-4) for result in results)
        losses[name] = alone["losses"]
    assert losses["with"] != pytest.approx(losses["without"], rel=1e-4)


def test_a_share_of_a_dense_model_is_dropped_as_well(ranks: RankPool, world: TinyWorld) -> None:
    folder: Path = world.dense
    results = [
        ranks.run(router_jobs.steps, str(folder), layout, BATCH, {"dropout": {"hidden": 0.1}}, ranks=count)[0]["losses"]
        for layout, count in (({}, 1), ({"tp": 2}, 2))
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
