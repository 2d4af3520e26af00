"""Routing rules and losses as plain loops over tokens and experts: slow, obvious, and differentiable.

Rows are lists of 0-dim tensors; a result is (gates [T][N] of tensors or 0, selected [T] lists of experts).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def best(row: Any, among: list[int], k: int) -> list[int]:
    """The k largest, the lowest index first among equals."""
    return sorted(among, key=lambda e: (-row[e].item(), e))[:k]


def softmax(row: Any, among: list[int]) -> dict[int, Tensor]:
    """Softmax over some entries of a row."""
    weights = {e: torch.exp(row[e] - max(row[i].item() for i in among)) for e in among}
    total = sum(weights.values())
    return {e: weight / total for e, weight in weights.items()}


def gates(rule: str, row: Any, k: int, groups: int = 1, tau: float = 1.0, noise: Any = None) -> dict[int, Tensor]:
    """Gates of one token, expert -> weight."""
    everything = list(range(len(row)))
    if rule == "top_k":
        return softmax(row, best(row, everything, k))
    if rule == "share":
        probabilities = softmax(row, everything)
        return {e: probabilities[e] for e in best(row, everything, k)}
    if rule == "soft":
        return softmax(row, everything)
    if rule == "sample_top1":
        noisy = [z + g for z, g in zip(row, noise)]
        (winner,) = best(noisy, everything, 1)
        return {winner: softmax([value / tau for value in noisy], everything)[winner]}
    assert rule == "divmoe"
    size = len(row) // groups
    winners = [best(row, everything[g * size : (g + 1) * size], 1)[0] for g in range(groups)]
    return softmax(row, best(row, winners, k))


def matrix(rows: list[dict[int, Tensor]], experts: int) -> tuple[Tensor, Tensor]:
    """Gates [T, N] and selection [T, N]."""
    zero = next(iter(rows[0].values())) * 0
    return (
        torch.stack([torch.stack([row.get(e, zero) for e in range(experts)]) for row in rows]),
        torch.tensor([[e in row for e in range(experts)] for row in rows]),
    )


def loss(
    name: str,
    logits: Tensor,
    rows: list[dict[int, Tensor]],
    valid: list[bool],
    k: int,
    sequences: int,
    load: list[float] | None = None,
) -> Tensor:
    """A loss over the valid tokens."""
    tokens = [t for t in range(len(rows)) if valid[t]]
    if name == "switch_seq":
        present = [b for b in range(sequences) if any(t % sequences == b for t in tokens)]
        kept = [[t % sequences == b and valid[t] for t in range(len(rows))] for b in present]
        return sum(loss("switch", logits, rows, mask, k, 1) for mask in kept) / len(present)  # type: ignore[return-value]
    experts = logits.shape[1]
    everything = list(range(experts))
    p = [sum(softmax(logits[t], everything)[e] for t in tokens) / len(tokens) for e in everything]
    count = [sum(e in rows[t] for t in tokens) for e in everything]
    gate = [sum((rows[t][e] for t in tokens if e in rows[t]), 0 * logits[0, 0]) for e in everything]
    if name == "btx":
        return experts * sum(gate[e] / len(tokens) * p[e] for e in everything)  # type: ignore[return-value]
    if name == "switch_global":  # with the counts of other micro-batches, which the caller gives
        return experts * sum(load[e] / k * p[e] for e in everything)  # type: ignore[return-value, index]
    if name in ("switch", "hf"):
        share = [count[e] / len(tokens) / (k if name == "switch" else 1) for e in everything]
        return experts * sum(share[e] * p[e] for e in everything)  # type: ignore[return-value]
    if name == "z":
        return sum(torch.log(sum(torch.exp(v) for v in logits[t])) ** 2 for t in tokens) / len(tokens)  # type: ignore
    if name == "importance":
        return squared_cv(gate)
    raise ValueError(name)


def squared_cv(values: list[Tensor]) -> Tensor:
    """Population variance over squared mean."""
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values) / mean**2  # type: ignore[return-value]


def chance(clean: Any, noisy: Any, scale: Any, expert: int, k: int) -> Tensor:
    """That fresh noise on one expert would have it selected, the others' noise as it is."""
    others = sorted((noisy[e] for e in range(len(noisy)) if e != expert), key=Tensor.item, reverse=True)
    x = (clean[expert] - others[k - 1]) / scale[expert]
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))
