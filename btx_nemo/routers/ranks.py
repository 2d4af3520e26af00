"""What the ranks that share a micro-batch hold, and where in its sequences that lies; of constants, no gradient flows.

Context parallelism cuts a sequence into 2 * cp pieces and gives rank r the pieces r and 2 * cp - 1 - r, so that all
have as many earlier tokens to look at; sequence parallelism cuts what such a rank has into successive parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(values: Tensor, group: Any) -> list[Tensor]:
    """Every rank's values, which have one shape. Collective."""
    if group.size() == 1:
        return [values]
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return parts


def context_positions(length: int, rank: int, ranks: int) -> Tensor:
    """Positions in the whole sequence of what a context-parallel rank has of it, `length` of them."""
    if ranks == 1:
        return torch.arange(length)
    piece = torch.arange(length // 2)
    return torch.cat([piece + rank * len(piece), piece + (2 * ranks - 1 - rank) * len(piece)])


@dataclass(frozen=True)
class Places:
    """Where in a micro-batch's sequences the tokens of each rank lie."""

    group: Any
    """The ranks that share the micro-batch: those of a tensor-parallel group, in succession for each of `context`."""
    context: int
    """Context-parallel ranks."""

    @property
    def parts(self) -> int:
        """Parts, of one size, in each of which a rank's positions follow on one another."""
        return 1 if self.context == 1 else 2

    def of(self, rank: int, length: int) -> Tensor:
        """Positions [length] that a rank has."""
        tensor = self.group.size() // self.context
        context_rank, tensor_rank = divmod(rank, tensor)
        mine = context_positions(tensor * length, context_rank, self.context)
        return mine[tensor_rank * length : (tensor_rank + 1) * length]

    def here(self, length: int) -> Tensor:
        """Positions [length] of this rank."""
        return self.of(self.group.rank(), length)

    def cut(self, whole_SX: Tensor) -> Tensor:
        """Of something for the whole sequence, its first axis, what is for this rank's positions."""
        length, rank = len(whole_SX) // self.group.size(), self.group.rank()
        if self.context == 1:
            return whole_SX[rank * length : (rank + 1) * length]
        return whole_SX[self.here(length).to(whole_SX.device)]

    def all(self, length: int) -> Tensor:
        """Positions of all ranks, in the order of the ranks: a permutation of those of the whole sequence."""
        return torch.cat([self.of(rank, length) for rank in range(self.group.size())])

    def gather_tokens(self, values_TX: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """A constant [T, X] of all ranks that share the micro-batch, by position, and this rank's tokens among them.

        T is this rank's positions of each of the `sequences`, position by position. Collective.
        """
        length, rows = len(values_TX) // sequences, torch.arange(sequences)

        def tokens(positions: Tensor) -> Tensor:
            return (positions[:, None] * sequences + rows).flatten().to(values_TX.device)

        whole_TX = torch.cat(gather(values_TX, self.group))
        return whole_TX[tokens(self.all(length).argsort())], tokens(self.here(length))

    def counts(self, selected_TE: Tensor) -> Tensor:
        """[P, E]: tokens that each of this rank's parts sends to each expert."""
        return torch.stack([part_TE.sum(dim=0) for part_TE in selected_TE.chunk(self.parts)])

    def sum_of_earlier(self, values_PX: Tensor) -> Tensor:
        """[P, X], a row for each part, in and out: the sum over the parts, of all ranks, before it. Collective."""
        whole_X = torch.cat(gather(values_PX, self.group))
        place = self.all(self.parts).to(whole_X.device)
        whole_X = whole_X[place.argsort()]
        return (whole_X.cumsum(dim=0) - whole_X)[self.here(self.parts).to(whole_X.device)]
