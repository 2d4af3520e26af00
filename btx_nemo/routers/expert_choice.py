"""`expert_choice`: each expert takes its best tokens (Zhou et al. 2022; Sparse Upcycling's encoders)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from btx_nemo.config.schema import RouterConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.routers.base import BaseRouter, moe_of
from btx_nemo.routers.functional import capacity_of, expert_choice_selection, softmax


class ExpertChoiceRouter(BaseRouter):
    """Each expert takes T / N * capacity_factor tokens of the micro-batch; a token may get all experts or none.

    Which expert a token gets depends on the tokens after it, so a causal model that was trained so cannot generate.
    """

    @dataclass(frozen=True)
    class Options:
        """How many tokens an expert takes."""

        allow_non_causal: bool = False
        """Say yes to looking ahead."""
        capacity_factor: float = 2.0
        """Tokens per expert over the fair share: experts per token on average."""

    variable_selection = True

    @classmethod
    def check(cls, model: ModelConfig) -> None:
        """See the base."""
        super().check(model)
        settings = cls.options_of(moe_of(model))
        if not settings.allow_non_causal:
            raise UserError(
                "moe.router=expert_choice looks at later tokens, so a causal model learns from what it cannot have "
                "when it generates; give moe.options.allow_non_causal=true if that is meant"
            )
        if not 0 < settings.capacity_factor < math.inf:
            raise UserError(f"moe.options.capacity_factor={settings.capacity_factor}: must be positive")

    @classmethod
    def check_training(cls, model: ModelConfig, router: RouterConfig) -> None:
        """See the base."""
        super().check_training(model, router)
        for name, weight in router.losses.items():
            if weight and name != "z":
                raise UserError(
                    f"router.losses.{name}: moe.router=expert_choice is balanced by itself; give router.losses.{name}=0"
                )

    @classmethod
    def mean_experts_per_token(cls, moe: MoEConfig, layer: int) -> float:
        """As many as the experts' capacities hold."""
        return min(cls.options_of(moe).capacity_factor, moe.num_experts)

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.expert_choice_selection`; among the tokens of all ranks that share the micro-batch."""
        probs_TE = softmax(logits_TE)
        scores_TE = probs_TE if self.valid_T is None else probs_TE - 2.0 * ~self.valid_T[:, None]  # padding comes last
        whole_TE, here = self.places.gather_tokens(scores_TE.detach(), self.sequences)
        capacity = int(capacity_of(self.tokens, self.moe.num_experts, self.settings.capacity_factor))
        selected_TE = expert_choice_selection(whole_TE, capacity)[here]
        return probs_TE * selected_TE, selected_TE
