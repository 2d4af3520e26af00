"""`switch`: the Switch Transformer's top-1 with a capacity (Fedus et al. 2021; Branch-Train-MiX section 4.3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.routers.base import BaseRouter, moe_of
from btx_nemo.routers.functional import capacity_of, top_k_gates, within_capacity


class SwitchRouter(BaseRouter):
    """Sends each token to its largest logit, weighted by its share of the full softmax.

    An expert takes ceil(T / N * capacity_factor) tokens of a micro-batch, in order of position; for the rest the
    layer adds nothing. Losses count the choice before that.
    """

    @dataclass(frozen=True)
    class Options:
        """How full an expert may be."""

        capacity_factor: float = 1.5
        """Tokens per expert over the fair share; 0 for no limit."""

    only_top_k = 1
    variable_selection = True

    @classmethod
    def check(cls, model: ModelConfig) -> None:
        """See the base."""
        super().check(model)
        factor = cls.options_of(moe_of(model)).capacity_factor
        if not 0 <= factor < math.inf:
            raise UserError(f"moe.options.capacity_factor={factor}: must not be negative (0: no limit)")

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.top_k_gates`."""
        return top_k_gates(logits_TE, 1, softmax_before=True, renormalise=False)

    def keep(self, selected_TE: Tensor) -> Tensor:
        """Drops what is over an expert's capacity, in order of position over all ranks that share the micro-batch."""
        if not self.settings.capacity_factor:
            return selected_TE
        capacity = capacity_of(self.tokens, self.moe.num_experts, self.settings.capacity_factor)
        earlier_PE = self.places.sum_of_earlier(self.places.counts(selected_TE))
        parts = zip(selected_TE.chunk(self.places.parts), earlier_PE, strict=True)
        return torch.cat([within_capacity(part_TE, capacity, earlier_E) for part_TE, earlier_E in parts])
