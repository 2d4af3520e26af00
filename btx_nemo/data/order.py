"""In which order sequences come: whole passes, each shuffled by itself, and blends; and which documents a sample has.

Everything is a function of the seed and the place in the order, so that a run resumes at any place.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np


def sample_size(count: int, share: float) -> int:
    """ceil(share * count), exact for a share in decimals (BAR, App. C: 5 % of 37 are 2)."""
    return math.ceil(Fraction(str(share)) * count)


def sample_documents(count: int, share: float, domain: str) -> np.ndarray:
    """Numbers of the documents of a domain's sample, sorted; they depend on nothing but the arguments."""
    if share == 1:
        return np.arange(count)
    order = np.random.RandomState(zlib.crc32(domain.encode())).permutation(count)
    return np.sort(order[: sample_size(count, share)])


class Passes:
    """Passes over the items of some datasets, all of them in each, in an order of its own.

    Where there are several datasets, items that are dicts have the `dataset_id` of theirs as well.
    """

    def __init__(self, datasets: Sequence[Any], passes: int, *, seed: tuple[int, ...]):
        self.datasets, self._passes, self._seed = list(datasets), passes, seed
        self._ends = np.cumsum([len(dataset) for dataset in datasets])
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        return int(self._ends[-1]) * self._passes

    def __getitem__(self, index: int) -> Any:
        which, dataset, item = self.origin(index)
        return _labelled(dataset[item], which) if len(self.datasets) > 1 else dataset[item]

    def origin(self, index: int) -> tuple[int, Any, int]:
        """Number of the dataset that an item is from, that dataset, and its item's number."""
        number, place = divmod(index, int(self._ends[-1]))
        item = int(self._order(number)[place])
        which = int(np.searchsorted(self._ends, item, side="right"))
        return which, self.datasets[which], item - (int(self._ends[which - 1]) if which else 0)

    def _order_of(self, number: int) -> np.ndarray:
        return np.random.RandomState([*self._seed, number]).permutation(int(self._ends[-1]))


class Blend:
    """Items of several `Passes` by weight, in the order of Megatron's blending. `datasets` is filled in later.

    Where there are several, items that are dicts have the `dataset_id` of theirs as well.
    """

    def __init__(self, weights: Sequence[float], size: int):
        from megatron.core.datasets import helpers

        self.datasets: list[Passes] = []
        self._which, self._item = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
        helpers.build_blending_indices(self._which, self._item, list(weights), len(weights), size, False)

    def count(self, number: int) -> int:
        """Items that are taken of a dataset."""
        return int((self._which == number).sum())

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> Any:
        which = int(self._which[index])
        item = self.datasets[which][int(self._item[index])]
        return _labelled(item, which) if len(self.datasets) > 1 else item

    def origin(self, index: int) -> tuple[int, Any, int]:
        """As `Passes.origin`."""
        which = int(self._which[index])
        return which, *self.datasets[which].origin(int(self._item[index]))[1:]


def _labelled(item: Any, which: int) -> Any:
    return {**item, "dataset_id": which} if isinstance(item, dict) else item
