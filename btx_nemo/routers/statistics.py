"""What a router did since the last reset, as sums over tokens: plain tensors on its device, in no checkpoint.

Shape suffixes: T tokens, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


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
    """[losses] summed values, without their weights."""
    micro_batches: Tensor
    """[] micro-batches that had a loss."""

    @staticmethod
    def zero(experts: int, losses: int, device: torch.device | str = "cpu") -> Sums:
        """Nothing seen."""
        shapes: tuple[tuple[int, ...], ...] = (
            (),
            (experts,),
            (),
            (experts,),
            (),
            (),
            (experts, experts),
            (losses,),
            (),
        )
        return Sums(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def flat(self) -> Tensor:
        """All sums as one vector."""
        return torch.cat([getattr(self, f.name).flatten() for f in fields(self)])

    @staticmethod
    def unflatten(flat: Tensor, experts: int, losses: int) -> Sums:
        """The inverse of `flat`."""
        parts = [getattr(Sums.zero(experts, losses), f.name) for f in fields(Sums)]
        pieces = flat.split([part.numel() for part in parts])
        return Sums(*(piece.view(part.shape) for piece, part in zip(pieces, parts)))


class RoutingStatistics:
    """Adds up `Sums`, without waiting for the device."""

    def __init__(self, num_experts: int, losses: tuple[str, ...] = ()):
        self.num_experts, self.losses = num_experts, losses
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
        values = (
            torch.full((), logits_TE.shape[0], device=logits_TE.device),
            chosen_E,
            chosen_E.sum() - kept,
            gates_TE.sum(dim=0),
            -(log_p_TE.exp() * log_p_TE).sum(),
            logits_TE.square().sum(),
            chosen_TE.T @ chosen_TE,
            torch.stack([losses[name] for name in self.losses]) if losses else logits_TE.new_zeros(len(self.losses)),
            torch.full((), int(bool(losses)), device=logits_TE.device),
        )
        flat = torch.cat([value.flatten().double() for value in values])
        self._flat = flat if self._flat is None else self._flat + flat

    def collect(self) -> Sums:
        """The sums of this rank, float64 on the CPU."""
        if self._flat is None:
            return Sums.zero(self.num_experts, len(self.losses))
        return Sums.unflatten(self._flat.cpu(), self.num_experts, len(self.losses))
