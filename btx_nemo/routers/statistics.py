"""What a router did since the last reset, as sums over tokens: plain tensors on its device, in no checkpoint.

Shape suffixes: T tokens, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from btx_nemo.routers.losses import LOSSES


@dataclass
class Sums:
    """Sums over tokens (and, for the losses, over micro-batches) that add up over ranks and micro-batches."""

    tokens: Tensor
    """[] tokens seen."""
    selected: Tensor
    """[E] tokens that chose each expert, before any is dropped."""
    dropped: Tensor
    """[] assignments that found no place."""
    gates: Tensor
    """[E] summed gates."""
    entropy: Tensor
    """[] summed entropy (nats) of the full softmax."""
    squares: Tensor
    """[] summed squares of the logits."""
    together: Tensor
    """[E, E] tokens that chose both experts."""
    losses: Tensor
    """[len(LOSSES)] summed values, without their weights."""
    micro_batches: Tensor
    """[len(LOSSES)] micro-batches that had each loss."""

    @staticmethod
    def zero(experts: int) -> Sums:
        """Nothing seen."""
        losses = len(LOSSES)
        shapes = ((), (experts,), (), (experts,), (), (), (experts, experts), (losses,), (losses,))
        return Sums(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def flat(self) -> Tensor:
        """All sums as one vector."""
        return torch.cat([getattr(self, f.name).flatten() for f in fields(self)])

    @staticmethod
    def unflatten(flat: Tensor, experts: int) -> Sums:
        """The inverse of `flat`."""
        parts = [getattr(Sums.zero(experts), f.name) for f in fields(Sums)]
        pieces = flat.split([part.numel() for part in parts])
        return Sums(*(piece.view(part.shape) for piece, part in zip(pieces, parts)))


class RoutingStatistics:
    """Adds up `Sums`, without waiting for the device."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._flat: Tensor | None = None

    @torch.no_grad()
    def add(
        self, logits_TE: Tensor, gates_TE: Tensor, selected_TE: Tensor, kept_TE: Tensor,
        valid_T: Tensor | None, losses: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Counts one micro-batch; only its valid tokens."""
        if valid_T is not None:
            logits_TE, gates_TE = logits_TE[valid_T], gates_TE[valid_T]
            selected_TE, kept_TE = selected_TE[valid_T], kept_TE[valid_T]
        log_p_TE = logits_TE.log_softmax(dim=-1)
        chosen_TE = selected_TE.to(logits_TE.dtype)
        chosen_E, kept = selected_TE.sum(dim=0), kept_TE.sum()
        zero, one = logits_TE.new_zeros(()), logits_TE.new_ones(())
        values = (
            torch.full((), logits_TE.shape[0], device=logits_TE.device),
            chosen_E,
            chosen_E.sum() - kept,
            gates_TE.sum(dim=0),
            -(log_p_TE.exp() * log_p_TE).sum(),
            logits_TE.square().sum(),
            chosen_TE.T @ chosen_TE,
            torch.stack([losses.get(name, zero) for name in LOSSES]),
            torch.stack([one if name in losses else zero for name in LOSSES]),
        )
        flat = torch.cat([value.flatten().double() for value in values])
        self._flat = flat if self._flat is None else self._flat + flat

    def collect(self) -> Sums:
        """The sums of this rank, float64 on the CPU."""
        if self._flat is None:
            return Sums.zero(self.num_experts)
        return Sums.unflatten(self._flat.cpu(), self.num_experts)
