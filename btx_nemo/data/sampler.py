"""Which sample goes into which batch: a pure function of (samples consumed, layout), so that a resumed run and a run at
another data-parallel size see exactly the same global batches.

Order within a global batch is Megatron's own (`MegatronPretrainingSampler`): microbatch m of data-parallel rank r holds
the samples `start + (m * dp_size + r) * micro_batch_size ...`, a contiguous slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from btx_nemo.errors import UserError

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
PADDING = "padding"
"""[S] bool, in the samples of packed conversations alone."""


class Dataset(Protocol):
    """A finite, indexable set of samples (`GPTDataset`, `BlendedDataset`, `torch.utils.data.Subset`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def num_microbatches(*, global_batch_size: int, micro_batch_size: int, dp_size: int) -> int:
    """Microbatches that each data-parallel rank runs for one global batch.

    Raises:
        UserError: the global batch does not divide into micro_batch_size * dp_size.
    """
    per_step = micro_batch_size * dp_size
    if min(global_batch_size, micro_batch_size, dp_size) < 1 or global_batch_size % per_step:
        raise UserError(
            f"global_batch_size={global_batch_size} is not a positive multiple of "
            f"micro_batch_size={micro_batch_size} x data-parallel size {dp_size}; "
            f"choose a multiple of {max(1, per_step)}"
        )
    return global_batch_size // per_step


def batches(
    dataset: Dataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    global_batch_size: int,
) -> Iterator[dict[str, Any]]:
    """Endless microbatches of one data-parallel rank, `num_microbatches` of them per global batch.

    Global batch k holds the samples `consumed_samples + k * global_batch_size ...`; past the end of the dataset the
    count starts again at its first sample.

    Args:
        dataset: what `build_datasets` returned for training.
        consumed_samples: samples used by the steps before (step * global_batch_size).
        micro_batch_size: B, sequences per microbatch.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.
        global_batch_size: sequences per optimizer step over all ranks.

    Returns:
        dicts of `tokens`, `labels`, `position_ids` [B, S] int64 and `loss_mask` [B, S] float32, on the CPU.

    Raises:
        UserError: the dataset is empty, or the sizes do not divide.
    """
    steps = num_microbatches(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp_size=dp_size)
    size = _size(dataset)
    return _endless(dataset, size, consumed_samples, micro_batch_size, dp_rank, dp_size, steps)


def _endless(
    dataset: Dataset, size: int, start: int, micro_batch_size: int, dp_rank: int, dp_size: int, steps: int
) -> Iterator[dict[str, Any]]:
    while True:
        for step in range(steps):
            first = start + (step * dp_size + dp_rank) * micro_batch_size
            yield collate([dataset[i % size] for i in range(first, first + micro_batch_size)])
        start += steps * dp_size * micro_batch_size


def num_validation_microbatches(
    dataset: Dataset, *, micro_batch_size: int, dp_size: int, num_samples: int | None = None, multiple_of: int = 1
) -> int:
    """Microbatches per rank that `validation_batches` yields: a multiple of `multiple_of`, the same on every rank."""
    per_round = micro_batch_size * dp_size * multiple_of
    return -(-_validation_size(dataset, num_samples) // per_round) * multiple_of


def validation_batches(
    dataset: Dataset,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_samples: int | None = None,
    multiple_of: int = 1,
) -> Iterator[dict[str, Any]]:
    """The same samples each time, from sample 0, each counted once whatever the layout.

    The first `num_samples` samples (all of them when None or when there are fewer) are spread over the ranks. Every
    rank yields `num_validation_microbatches` microbatches; places that are left over repeat a sample with a loss mask
    of zero. So the exact mean loss is sum(loss * mask) / sum(mask) over all microbatches **and ranks**; the mask of
    one single microbatch may be all zero.

    Returns and raises as `batches`.
    """
    rounds = num_validation_microbatches(
        dataset,
        micro_batch_size=micro_batch_size,
        dp_size=dp_size,
        num_samples=num_samples,
        multiple_of=multiple_of,
    )
    return _once(dataset, _validation_size(dataset, num_samples), rounds, micro_batch_size, dp_rank, dp_size)


def _once(
    dataset: Dataset, wanted: int, rounds: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[dict[str, Any]]:
    for step in range(rounds):
        first = (step * dp_size + dp_rank) * micro_batch_size
        places = range(first, first + micro_batch_size)
        batch = collate([dataset[i % wanted] for i in places])
        for row, place in enumerate(places):
            if place >= wanted:
                batch["loss_mask"][row] = 0.0
        yield batch


def collate(samples: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack samples into one microbatch [B, S]: what the model reads, and in a blend each one's dataset."""
    import torch

    batch = {key: torch.stack([sample[key] for sample in samples]) for key in BATCH_KEYS}
    if any(PADDING in sample for sample in samples):  # text beside conversations has none
        none = torch.zeros_like(batch["tokens"][0], dtype=torch.bool)
        batch[PADDING] = torch.stack([sample.get(PADDING, none) for sample in samples])
    if "dataset_id" in samples[0]:
        batch["dataset_id"] = torch.tensor([int(sample["dataset_id"]) for sample in samples])
    return batch


def _size(dataset: Dataset) -> int:
    size = len(dataset)
    if size < 1:
        raise UserError("data: the dataset holds no full sequence; add text, or lower the sequence length")
    return size


def _validation_size(dataset: Dataset, num_samples: int | None) -> int:
    size = _size(dataset)
    if num_samples is None:
        return size
    if num_samples < 1:
        raise UserError(f"data: {num_samples} validation samples were asked for; ask for at least one")
    return min(num_samples, size)
