"""Data-side jobs for the pool of ranks."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from btx_nemo.data.datasets import build_datasets
from btx_nemo.data.sampler import batches


def first_batches(data: str, cache: str, arguments: dict[str, Any], micro_batch_size: int, count: int) -> list[Any]:
    """Token rows of the first microbatches of this data-parallel rank (all ranks are data-parallel)."""
    import torch

    train, _ = build_datasets(Path(data), cache_dir=Path(cache), **arguments)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    stream = batches(
        train,
        consumed_samples=0,
        micro_batch_size=micro_batch_size,
        dp_rank=rank,
        dp_size=size,
        global_batch_size=micro_batch_size * size,
    )
    return [batch["tokens"].tolist() for batch in islice(stream, count)]
