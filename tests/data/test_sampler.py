"""Batches are a function of the samples consumed and the layout, and of nothing else."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from btx_nemo.data.sampler import batches, num_microbatches, num_validation_microbatches, validation_batches
from btx_nemo.errors import UserError


class Numbers:
    """Sample i holds the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        row = torch.full((3,), index)
        return {"tokens": row, "labels": row + 1, "loss_mask": torch.ones(3), "position_ids": torch.arange(3)}


def ids(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


def global_batches(size: int, *, dp: int, mbs: int, gbs: int, consumed: int, count: int) -> list[list[int]]:
    steps = num_microbatches(global_batch_size=gbs, micro_batch_size=mbs, dp_size=dp)
    ranks = [
        batches(
            Numbers(size),
            consumed_samples=consumed,
            micro_batch_size=mbs,
            dp_rank=rank,
            dp_size=dp,
            global_batch_size=gbs,
        )
        for rank in range(dp)
    ]
    found = []
    for _ in range(count):
        parts = [[ids(next(rank)) for _ in range(steps)] for rank in ranks]
        found.append([number for step in range(steps) for part in parts for number in part[step]])
    return found


@pytest.mark.parametrize(("dp", "mbs"), [(1, 8), (1, 1), (2, 2), (4, 2), (8, 1)])
def test_global_batches_are_the_same_and_in_order_for_every_layout(dp: int, mbs: int) -> None:
    expected = [[(k * 8 + i) % 50 for i in range(8)] for k in range(10)]
    assert global_batches(50, dp=dp, mbs=mbs, gbs=8, consumed=0, count=10) == expected


@pytest.mark.parametrize("resumed_at", [1, 3, 7])
def test_resume_continues_exactly_even_at_another_layout(resumed_at: int) -> None:
    whole = global_batches(50, dp=1, mbs=4, gbs=8, consumed=0, count=12)
    rest = global_batches(50, dp=2, mbs=2, gbs=8, consumed=resumed_at * 8, count=12 - resumed_at)
    assert whole[resumed_at:] == rest


def test_each_sample_once_per_pass() -> None:
    seen = [number for batch in global_batches(48, dp=2, mbs=2, gbs=8, consumed=0, count=6) for number in batch]
    assert sorted(seen) == list(range(48))


@pytest.mark.parametrize("size", [1, 3, 8, 17])
@pytest.mark.parametrize(("dp", "mbs"), [(1, 1), (1, 4), (2, 3), (4, 2)])
def test_validation_counts_every_sample_once_at_every_layout(size: int, dp: int, mbs: int) -> None:
    for limit in (None, 1, 5, 100):
        counted: list[int] = []
        rounds = num_validation_microbatches(Numbers(size), micro_batch_size=mbs, dp_size=dp, num_samples=limit)
        for rank in range(dp):
            found = list(
                validation_batches(Numbers(size), micro_batch_size=mbs, dp_rank=rank, dp_size=dp, num_samples=limit)
            )
            assert len(found) == rounds >= 1
            for batch in found:
                assert batch["tokens"].shape == (mbs, 3)
                counted += [number for number, mask in zip(ids(batch), batch["loss_mask"][:, 0]) if mask]
        assert sorted(counted) == list(range(min(size, limit or size)))


def test_masking_a_leftover_place_does_not_touch_the_dataset() -> None:
    dataset = Numbers(1)
    shared = dataset[0]
    dataset.__class__ = type("Shared", (Numbers,), {"__getitem__": lambda *_: shared})
    list(validation_batches(dataset, micro_batch_size=4, dp_rank=0, dp_size=1))
    assert shared["loss_mask"].tolist() == [1, 1, 1]


def test_shapes_and_dtypes() -> None:
    stream = batches(Numbers(9), consumed_samples=0, micro_batch_size=2, dp_rank=0, dp_size=1, global_batch_size=4)
    (batch,) = islice(stream, 1)
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert all(batch[key].shape == (2, 3) for key in batch)
    assert batch["tokens"].dtype == batch["labels"].dtype == batch["position_ids"].dtype == torch.int64


def test_user_errors() -> None:
    common = {"consumed_samples": 0, "dp_rank": 0}
    for gbs, mbs, dp in ((6, 4, 1), (8, 2, 3), (0, 1, 1), (4, 0, 1)):
        with pytest.raises(UserError, match="global_batch_size"):
            batches(Numbers(9), micro_batch_size=mbs, dp_size=dp, global_batch_size=gbs, **common)
    with pytest.raises(UserError, match="no full sequence"):
        batches(Numbers(0), micro_batch_size=1, dp_size=1, global_batch_size=1, **common)
    with pytest.raises(UserError, match="no full sequence"):
        validation_batches(Numbers(0), micro_batch_size=1, dp_rank=0, dp_size=1)
    with pytest.raises(UserError, match="at least one"):
        validation_batches(Numbers(5), micro_batch_size=1, dp_rank=0, dp_size=1, num_samples=0)
