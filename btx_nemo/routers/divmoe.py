"""`divmoe`: DivMoE's Algorithm 1, at most one expert of each domain group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.routers.base import BaseRouter, moe_of
from btx_nemo.routers.functional import grouped_top_k_gates


class DivMoERouter(BaseRouter):
    """The best expert of each group, the k best groups, softmax over these k. Experts lie group by group."""

    @dataclass(frozen=True)
    class Options:
        """How the experts are grouped."""

        groups: int
        """Domain groups; divides the number of experts and is at least top_k."""

    @classmethod
    def check(cls, model: ModelConfig) -> None:
        """See the base."""
        super().check(model)
        moe, groups = moe_of(model), cls.options_of(moe_of(model)).groups
        if groups < 1 or moe.num_experts % groups:
            raise UserError(f"moe.options.groups={groups}: must divide the {moe.num_experts} experts")
        if moe.top_k > groups:
            raise UserError(
                f"moe.top_k={moe.top_k} is more than the moe.options.groups={groups} groups, of which each gives a "
                "token one expert at most; lower top_k"
            )

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.grouped_top_k_gates`."""
        return grouped_top_k_gates(logits_TE, self.settings.groups, self.moe.top_k)
