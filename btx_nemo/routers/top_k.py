"""`top_k`: Branch-Train-MiX's Top-k (section 3.2) and Mixtral's rule, softmax over the k kept logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from btx_nemo.config.choice import check_choice
from btx_nemo.config.schema import RouterConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.routers.base import BaseRouter, moe_of
from btx_nemo.routers.functional import top_k_gates


class TopKRouter(BaseRouter):
    """Sends each token to its k largest logits, weighted by the softmax over these k, or by their share of all."""

    @dataclass(frozen=True)
    class Options:
        """Where the softmax stands."""

        softmax: str = "after"
        """after (over the k kept logits) or before (over all)."""
        renormalise: bool = True
        """With softmax before: divide the k gates by their sum, which makes it the same as after."""

    @classmethod
    def check(cls, model: ModelConfig) -> None:
        """See the base."""
        super().check(model)
        check_choice("moe.options.softmax", cls.options_of(moe_of(model)).softmax, ("after", "before"))

    @classmethod
    def check_training(cls, model: ModelConfig, router: RouterConfig) -> None:
        """See the base."""
        super().check_training(model, router)
        settings = cls.options_of(moe_of(model))
        if moe_of(model).top_k == 1 and (settings.softmax == "after" or settings.renormalise):
            raise UserError(
                "moe.top_k=1: the one gate is always 1, so the router would get no gradient; give moe.router=switch, "
                "or moe.options.softmax=before moe.options.renormalise=false"
            )

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.top_k_gates`."""
        before = self.settings.softmax == "before"
        return top_k_gates(
            logits_TE, self.moe.top_k, softmax_before=before, renormalise=not before or self.settings.renormalise
        )
