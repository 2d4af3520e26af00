"""Numbers that a plan needs of the values of tensors, measured in a streamed pass before anything is written.

Memory does not grow with the tensors, and a result does not depend on the number of workers: counts are whole numbers,
and sums are added in the order of the blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from btx_nemo.plan.evaluate import Evaluator, TensorReader, trim
from btx_nemo.plan.expr import Choice, Combine, Expr, Number, Ties, children, crop, infer, push_down, rebuild
from btx_nemo.plan.fresh import chosen
from btx_nemo.plan.layout import Box, Layout, TensorInfo, full_box, row_blocks

BLOCK_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Moments:
    """NAME/mean and NAME/std (unbiased) of the chosen entries of `of` along `dim`, all together."""

    of: Expr
    dim: int
    choice: Choice

    def names(self, name: str) -> tuple[str, ...]:
        """The numbers that it gives."""
        return (f"{name}/mean", f"{name}/std")

    def parts(self) -> tuple[Expr, ...]:
        """What it reads."""
        return (self.of,)

    def with_parts(self, parts: Iterable[Expr]) -> Moments:
        """The same of other expressions."""
        return replace(self, of=next(iter(parts)))

    def measure(self, blocks: Blocks) -> tuple[float, ...]:
        """One pass: the sums of the values and of their squares, in float64."""

        def sums(block: torch.Tensor, box: Box) -> torch.Tensor:
            low, high = box[self.dim]
            seen = replace(self.choice, start=self.choice.start + low)
            values = block.index_select(self.dim, chosen(blocks.seed, seen, high - low)).double()
            return torch.stack((values.sum(), values.square().sum(), torch.tensor(float(values.numel()))))

        total = torch.zeros(3, dtype=torch.float64)
        for part in blocks.each(self.parts(), sums):
            total += part
        mean = total[0] / total[2]
        variance = (total[1] - total[2] * mean.square()) / max(float(total[2]) - 1, 1)
        return float(mean), float(variance.clamp(min=0).sqrt())


@dataclass(frozen=True)
class Threshold:
    """The magnitude that the largest `density` of all values of `of` reach: exactly, whatever their number.

    Two passes: a histogram of the upper half of the bits, then one of the lower half where the threshold lies.
    """

    of: tuple[Expr, ...]
    density: float

    def names(self, name: str) -> tuple[str, ...]:
        """The number that it gives."""
        return (name,)

    def parts(self) -> tuple[Expr, ...]:
        """What it reads."""
        return self.of

    def with_parts(self, parts: Iterable[Expr]) -> Threshold:
        """The same of other expressions."""
        return replace(self, of=tuple(parts))

    def measure(self, blocks: Blocks) -> tuple[float, ...]:
        """The int(density * n)-th largest magnitude; infinity when that is none of them."""
        kept = int(self.density * sum(infer(part, blocks.sources).numel for part in self.of))
        if kept == 0:
            return (float("inf"),)
        upper, above = _nth_from_above(blocks.each(self.of, lambda block, _: _histogram(block, None)), kept)
        histograms = blocks.each(self.of, lambda block, _: _histogram(block, upper))
        lower, _ = _nth_from_above(histograms, kept - above)
        return (float(np.array(upper << 16 | lower, dtype=np.uint32).view(np.float32)),)


@dataclass(frozen=True)
class Majority:
    """The sign, 1 or -1, that most elected signs of `of` have."""

    of: tuple[Ties, ...]

    def names(self, name: str) -> tuple[str, ...]:
        """The number that it gives."""
        return (name,)

    def parts(self) -> tuple[Expr, ...]:
        """What it reads."""
        return self.of

    def with_parts(self, parts: Iterable[Expr]) -> Majority:
        """The same of other expressions."""
        return replace(self, of=tuple(part for part in parts if isinstance(part, Ties)))

    def measure(self, blocks: Blocks) -> tuple[float, ...]:
        """One pass over all parts of each."""
        total = 0
        for part in self.of:
            whole = infer(part, blocks.sources)

            def vote(evaluator: Evaluator, box: Box, part: Ties = part, whole: TensorInfo = whole) -> int:
                values = torch.stack([blocks.block(evaluator, piece, whole, box) for piece in part.parts])
                return int(trim(values[0], values[1:], part).sum())

            total += sum(blocks.run(row_blocks(TensorInfo(whole.shape, "float32"), BLOCK_BYTES), vote))
        return (1.0 if total >= 0 else -1.0,)


Statistic: TypeAlias = Moments | Threshold | Majority


def _histogram(block: torch.Tensor, upper: int | None) -> np.ndarray:
    """Counts of the upper 16 bits of the magnitudes, or of the lower 16 of those whose upper ones are `upper`."""
    bits = block.abs().contiguous().numpy().reshape(-1).view(np.uint32)
    halves = bits >> 16 if upper is None else bits[bits >> 16 == upper] & 0xFFFF
    return np.bincount(halves, minlength=1 << 16)


def _nth_from_above(histograms: Iterator[np.ndarray], n: int) -> tuple[int, int]:
    """(bin of the n-th largest value, values in the bins above it)."""
    total = np.zeros(1 << 16, dtype=np.int64)
    for histogram in histograms:
        total += histogram
    from_above = np.cumsum(total[::-1])
    at = int(np.searchsorted(from_above, n))
    return (1 << 16) - 1 - at, int(from_above[at] - total[::-1][at])


class Blocks:
    """Runs functions over the blocks of expressions, in threads; results come in the order of the blocks."""

    def __init__(
        self, readers: Mapping[str, TensorReader], sources: Mapping[str, Layout], seed: int, pool: ThreadPoolExecutor
    ) -> None:
        self.sources, self.seed = sources, seed
        self._readers, self._pool = readers, pool
        self._local = threading.local()

    def run(self, boxes: list[Box], function: Callable[[Evaluator, Box], T]) -> Iterator[T]:
        """`function(evaluator, box)` of every box."""

        def call(box: Box) -> T:
            if not hasattr(self._local, "evaluator"):
                self._local.evaluator = Evaluator(self._readers, self.sources, self.seed)
            return function(self._local.evaluator, box)

        for first in range(0, len(boxes), 64):  # few at a time: their results wait for their turn
            yield from self._pool.map(call, boxes[first : first + 64])

    def each(self, parts: Iterable[Expr], function: Callable[[torch.Tensor, Box], T]) -> Iterator[T]:
        """`function(values, box)` of the fp32 values of every block of every part."""
        for part in parts:
            whole = infer(part, self.sources)
            pushed = push_down(part, self.sources, whole)
            boxes = row_blocks(TensorInfo(whole.shape, "float32"), BLOCK_BYTES)

            def of_block(evaluator: Evaluator, box: Box, pushed: Expr = pushed, whole: TensorInfo = whole) -> T:
                return function(self.block(evaluator, pushed, whole, box), box)

            yield from self.run(boxes, of_block)

    def block(self, evaluator: Evaluator, expr: Expr, whole: TensorInfo, box: Box) -> torch.Tensor:
        """The fp32 values of a part of an expression."""
        out = torch.empty([high - low for low, high in box or full_box(())], dtype=torch.float32)
        evaluator.into(crop(push_down(expr, self.sources, whole), box, self.sources, whole), out, whole, "")
        return out


def measure(
    statistics: Mapping[str, Statistic],
    readers: Mapping[str, TensorReader],
    sources: Mapping[str, Layout],
    *,
    seed: int = 0,
    workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """The numbers of all statistics by name, in their order; `progress` is told the name of each when it is done."""
    values: dict[str, float] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="btx-measure") as pool:
        blocks = Blocks(readers, sources, seed, pool)
        for name, statistic in statistics.items():
            known = statistic.with_parts([with_values(part, values) for part in statistic.parts()])
            values |= zip(statistic.names(name), known.measure(blocks), strict=True)
            if progress:
                progress(name)
    return values


def with_values(expr: Expr, values: Mapping[str, float]) -> Expr:
    """The expression with the numbers that are known put in for their names."""

    def known(numbers: tuple[Number, ...]) -> tuple[Number, ...]:
        return tuple(values.get(number, number) if isinstance(number, str) else number for number in numbers)

    expr = rebuild(expr, [with_values(part, values) for part in children(expr)])
    if isinstance(expr, Combine):
        return replace(expr, weights=known(expr.weights))
    if isinstance(expr, Ties):
        return replace(expr, thresholds=known(expr.thresholds), zero_sign=known((expr.zero_sign,))[0])
    return expr
