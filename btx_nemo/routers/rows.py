"""Rows of a router that stay as they are, while the others train: FlexOlmo's and BAR's public expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from btx_nemo.errors import UserError
from btx_nemo.families.config import MoEConfig


class FrozenRows:
    """Rows of frozen experts: no gradient, and the same bits after a step, weight decay or not.

    They stay in one parameter with the others, so that a checkpoint does not depend on what was frozen.
    """

    def __init__(self, experts: Sequence[int]):
        self.experts = list(experts)
        self._rows: list[tuple[torch.nn.Parameter, int]] = []
        self._before: list[Tensor] = []

    def add(self, parameter: torch.nn.Parameter, first: int) -> None:
        """Holds a parameter's rows of frozen experts; its first row is of expert `first`."""
        rows = [expert - first for expert in self.experts if expert >= first]

        def without(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            for row in rows:
                gradient[row] = 0
            return gradient

        if rows:
            parameter.register_hook(without)
            self._rows += [(parameter, row) for row in rows]

    def remember(self) -> None:
        """Before an optimizer step."""
        self._before = [parameter[row].detach().clone() for parameter, row in self._rows]

    @torch.no_grad()
    def restore(self) -> None:
        """After it: takes back what weight decay did."""
        for (parameter, row), before in zip(self._rows, self._before, strict=True):
            parameter[row] = before


def check_frozen_rows(frozen: Sequence[int], moe: MoEConfig, rows: bool) -> None:
    """Raises UserError for rows that are not there, and where none would train."""
    if frozen and not rows:
        raise UserError(f"router.frozen_rows={list(frozen)}: moe.router={moe.router} has no rows of its own to freeze")
    for expert in frozen:
        if not 0 <= expert < moe.num_experts:
            raise UserError(f"router.frozen_rows={list(frozen)}: there are experts 0 to {moe.num_experts - 1}")
    if len(set(frozen)) == moe.num_experts:
        raise UserError(f"router.frozen_rows={list(frozen)} are all rows; give freeze=[*.mlp.router.*] for that")
