"""A loss per token: gradients of the losses on the routing weigh a micro-batch as its tokens, at every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from btx_testing import frame_jobs, router_jobs
from btx_testing.jobs import random_batch
from btx_testing.pool import RankPool
from btx_testing.runs import VOCAB, TinyWorld

LOSSES = {"btx": 0.5, "switch": 0.5, "hf": 0.1, "switch_seq": 0.3, "switch_global": 0.3, "importance": 0.2, "z": 0.1}
LAYOUTS = [({"tp": 2, "ep": 2}, 2), ({"pp": 2}, 2), ({"ep": 2}, 2)]


def gradients(
    ranks: RankPool, world: TinyWorld, batch: dict[str, torch.Tensor], layout: Any = None, count: int = 1, **more: Any
) -> dict[str, torch.Tensor]:
    options = {"router": {"losses": LOSSES}, **more}
    return router_jobs.whole(
        ranks.run(router_jobs.steps, str(world.mixture), layout or {}, batch, options, ranks=count)
    )


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(
            ours[key], value, rtol=1e-3, atol=1e-4 * scale + 1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("losses", [LOSSES, {"load": 0.2}], ids=["counted", "load"])
def test_with_equal_counts_it_is_the_mean_over_micro_batches(
    ranks: RankPool, world: TinyWorld, losses: dict[str, float]
) -> None:
    batch = random_batch(VOCAB, total=4, length=16)
    more = {"router": {"losses": losses}, "moe": {"router": "noisy_top_k"}}
    expected = gradients(ranks, world, batch, **more)
    for layout, count in [({}, 1), *LAYOUTS[:2]]:
        close(gradients(ranks, world, batch, layout, count, per_token_loss=True, **more), expected)


def test_with_unequal_counts_micro_batches_weigh_as_their_tokens(ranks: RankPool, world: TinyWorld) -> None:
    """Against the gradients of each micro-batch by itself; one has no token at all."""
    batch = random_batch(VOCAB, total=4, length=16)
    counts = [16, 3, 0, 9]
    for row, count in enumerate(counts):
        batch["loss_mask"][row, count:] = 0
    losses = {name: weight for name, weight in LOSSES.items() if name != "switch_global"}  # sees what went before
    router = {"losses": losses}
    parts = [
        gradients(ranks, world, {key: value[m : m + 1] for key, value in batch.items()}, router=router)
        for m in range(4)
    ]
    expected = {
        key: sum(count / sum(counts) * part[key] for count, part in zip(counts, parts))  # type: ignore[misc]
        for key in parts[0]
    }
    assert all(part.keys() == parts[0].keys() for part in parts)
    for layout, ranks_ in [({}, 1), *LAYOUTS]:
        for recompute in ("none", "full"):
            more = {"router": router, "recompute": recompute, "per_token_loss": True}
            close(gradients(ranks, world, batch, layout, ranks_, **more), expected)
    # And it is another thing than the mean over micro-batches.
    mean = gradients(ranks, world, batch, router=router)
    key = next(key for key in mean if "linear_qkv.weight" in key)
    assert not torch.allclose(mean[key], expected[key], rtol=1e-2)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["btx", "switch", "hf", "switch_seq", "importance", "z", "switch_global"])
def test_a_foreign_training_loop_gets_megatrons_convention(ranks: RankPool, name: str, count: int) -> None:
    """Without word of the loss's tokens a micro-batch counts as its tokens that are no padding do, on all ranks."""
    for plain, scaled, tokens in ranks.run(frame_jobs.per_token, name, {"tp": count}, ranks=count):
        torch.testing.assert_close(scaled, tokens * plain, rtol=1e-5, atol=1e-6)
