"""The health of a run: steps without a finite loss or gradient, which batches they had, and losses that jump."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from btx_nemo.config.schema import RobustConfig, TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.train.step import StepResult

LEAST_DEVIATION = 0.01
"""A loss that hardly moves has a tiny deviation: it counts as at least this share of the median."""

MOST_SECONDS = 1e9
"""Of robust.hang_seconds: thirty years, which the timeouts of collectives and threads still hold."""


def check_robust(config: TrainConfig) -> None:
    """Raises UserError for a setting that means nothing."""
    robust = config.robust
    for name in ("max_skipped", "hang_seconds", "spike_zscore"):
        if not 0 <= getattr(robust, name) < math.inf:
            raise UserError(f"robust.{name}={getattr(robust, name)}: must be a number that is not negative")
    if robust.hang_seconds > MOST_SECONDS:
        raise UserError(
            f"robust.hang_seconds={robust.hang_seconds:g}: must be at most {MOST_SECONDS:g}, or 0 for never"
        )
    if robust.spike_window < 4:
        raise UserError(f"robust.spike_window={robust.spike_window}: must be 4 or more")


@dataclasses.dataclass
class Watch:
    """What is remembered of the steps before; the same on every rank, and a part of each checkpoint."""

    robust: RobustConfig
    skipped: int = 0
    """Steps in a row that were skipped, up to now."""
    losses: list[float] = dataclasses.field(default_factory=list)
    """Of the last steps that were not."""

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {"skipped": self.skipped, "losses": list(self.losses)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint; one of before has none."""
        self.skipped, self.losses = int(state.get("skipped", 0)), list(state.get("losses", []))

    def see(self, result: StepResult) -> float | None:
        """Takes note of a step; returns how many deviations its loss lies above the median, where that is a spike."""
        if result.empty:
            return None
        if not result.finite:
            self.skipped += 1
            return None
        self.skipped = 0
        found = spike(self.losses, result.loss, self.robust)
        self.losses = [*self.losses, result.loss][-self.robust.spike_window :]
        return found

    @property
    def broken(self) -> bool:
        """Whether more steps in a row were skipped than may be."""
        return self.skipped > self.robust.max_skipped


def spike(before: Sequence[float], loss: float, robust: RobustConfig) -> float | None:
    """Robust z-score of a loss, (loss - median) / (1.4826 MAD), where it says spike."""
    if not robust.spike_zscore or len(before) < robust.spike_window // 4:
        return None
    middle = statistics.median(before)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in before)
    score = (loss - middle) / max(deviation, LEAST_DEVIATION * abs(middle), 1e-12)
    return score if score > robust.spike_zscore else None


def batch_ids(dataset: Any, domains: Sequence[str], samples: range) -> list[dict[str, Any]]:
    """Where each of these samples of the run is from: its number, its domain, its documents where Megatron knows them.

    `domains` are the blend's, in its order.
    """
    return [_origin(dataset, domains, number) for number in samples]


def _origin(dataset: Any, domains: Sequence[str], number: int) -> dict[str, Any]:
    index, which = number % len(dataset), 0
    if hasattr(dataset, "origin"):  # conversations, or whole passes
        which, dataset, index = dataset.origin(index)
    elif hasattr(dataset, "dataset_sample_index"):  # Megatron's blend
        dataset[index]  # Megatron opens its indices when they are first used
        which, index = int(dataset.dataset_index[index]), int(dataset.dataset_sample_index[index])
        dataset = dataset.datasets[which]
    return {"sample": number, "domain": domains[which], "documents": _documents(dataset, index)}


def _documents(dataset: Any, index: int) -> list[int] | None:
    """Numbers of the documents that a sample of Megatron's GPTDataset is cut from, or that are packed in a sequence."""
    if hasattr(dataset, "packing"):
        return list(dataset.packing.sequences[index])
    if not hasattr(dataset, "document_index"):
        return None
    dataset[index]
    at = int(dataset.shuffle_index[index])
    first, last = int(dataset.sample_index[at][0]), int(dataset.sample_index[at + 1][0])
    return [int(document) for document in dataset.document_index[first : last + 1]]
