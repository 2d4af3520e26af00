"""How far specialists are from their seed: a copy of it, and a model that never came from it, are common mistakes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from btx_nemo.families import names
from btx_nemo.families.source import Source
from btx_nemo.plan.evaluate import evaluate

SAMPLE_ROWS = 16
"""Rows of each matrix that are read, from its middle: a thousandth of a model, which is enough to tell."""
FAR = 1.0
"""Models that have nothing in common are the square root of two apart; training moves one far less than this."""


def distances(seed: Source, expert: Source) -> list[tuple[float, float]]:
    """Per layer: |expert - seed| / |seed| over samples of its matrices, of all of them and of the feed-forward's.

    Both are dense, with the same layout. Raises UserError where a sampled value is not finite.
    """
    sums = torch.zeros(seed.config.num_layers, 2, 2, dtype=torch.float64)
    for name, info in seed.layout().items():
        layer = names.layer_of(name)
        if layer is None or len(info.shape) < 2:  # norms are near one in every model
            continue
        a, b = (_sample(source, name).double() for source in (seed, expert))
        squares = torch.stack([(b - a).square().sum(), a.square().sum()])
        sums[layer, 0] += squares
        if names.parse_ffn(name):
            sums[layer, 1] += squares
    ratio = (sums[..., 0] / sums[..., 1].clamp(min=1e-300)).sqrt()
    return [(float(everything), float(ffn)) for everything, ffn in ratio]


def _sample(source: Source, name: str) -> torch.Tensor:
    info = source.layout()[name]
    count = min(SAMPLE_ROWS, info.shape[0])
    first = (info.shape[0] - count) // 2
    box = ((first, first + count), *((0, size) for size in info.shape[1:]))
    return evaluate(source.table[name], {source.name: source.reader}, info, name, 0, box)


def report(seed: Source, experts: Sequence[Source]) -> tuple[list[str], list[str]]:
    """(a line for each specialist, warnings), where it and the seed are dense. Reads a few rows of each tensor."""
    lines, warnings = [], []
    for expert in experts:
        if seed.config.moe or expert.config.moe:
            continue
        by_layer = distances(seed, expert)
        shown = " ".join(f"{everything:.2g}" for everything, _ in by_layer)
        lines.append(f"{expert.name}: relative distance from the seed, layer by layer: {shown}")
        furthest = max(range(len(by_layer)), key=lambda layer: by_layer[layer][0])
        far = by_layer[furthest][0]
        if all(everything == 0 for everything, _ in by_layer):
            warnings.append(f"{expert.folder}: expert {expert.name} looks bit-equal to the seed; was it trained?")
        elif all(ffn == 0 for _, ffn in by_layer):
            warnings.append(
                f"{expert.folder}: expert {expert.name} has the seed's feed-forward blocks; were they frozen?"
            )
        elif far >= FAR:
            warnings.append(
                f"{expert.folder}: expert {expert.name} is {far:.2f} times the seed's size away from it in layer "
                f"{furthest}; did it start from {seed.folder}?"
            )
    return lines, warnings
