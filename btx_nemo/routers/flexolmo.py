"""`flexolmo`: FlexOlmo's router (section 3.2), a share of the full softmax and a non-positive bias on added experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from btx_nemo.config.schema import RouterConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.expr import Full
from btx_nemo.routers.base import BaseRouter, Fresh, moe_of
from btx_nemo.routers.functional import top_k_gates, with_penalty


class FlexOlmoRouter(BaseRouter):
    """Top-k of the full softmax, not renormalised. Expert 0 is the public one.

    The bias is projected to at most zero after each step rather than by a minimum in the logits, which would halve the
    gradient at zero and stop it above.
    """

    @dataclass(frozen=True)
    class Options:
        """The bias."""

        bias: bool = False
        """A trainable bias <= 0 on the logit of every expert but the public one; dropped when experts are merged."""

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.penalty = self.parameter(self.moe.num_experts - 1, first=1) if self.settings.bias else None

    @classmethod
    def tensors(cls, model: ModelConfig, router: RouterConfig) -> Fresh:
        """The weight and, with `bias`, the bias of experts 1, 2, ..."""
        bias = {"router.penalty": ((moe_of(model).num_experts - 1,), Full(0.0))}
        return {**super().tensors(model, router), **(bias if cls.options_of(moe_of(model)).bias else {})}

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Weight rows times hidden, plus the bias."""
        logits_TE = super().logits(hidden_TH)
        if self.penalty is None:
            return logits_TE
        return with_penalty(logits_TE, self.penalty)

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.top_k_gates`."""
        return top_k_gates(logits_TE, self.moe.top_k, softmax_before=True, renormalise=False)

    @torch.no_grad()
    def after_step(self) -> None:
        """Keeps the bias at most zero."""
        super().after_step()
        if self.penalty is not None:
            self.penalty.clamp_(max=0)
