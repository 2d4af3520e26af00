"""`noisy_top_k`: the noisy top-k gating of Shazeer et al. 2017 (section 2.1), whose noise is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from btx_nemo.config.schema import RouterConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.expr import Full
from btx_nemo.routers.base import BaseRouter, Fresh, fresh_weight, moe_of
from btx_nemo.routers.functional import noisy_logits, top_k_gates
from btx_nemo.routers.losses import Decision


class NoisyTopKRouter(BaseRouter):
    """In training, top-k of x W_g + eps * softplus(x W_noise), softmax over these k; without noise at inference."""

    extra_losses = ("load",)

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.noise_weight = self.parameter(self.moe.num_experts, self.config.hidden_size, first=0)

    @classmethod
    def check_training(cls, model: ModelConfig, router: RouterConfig) -> None:
        """See the base."""
        super().check_training(model, router)
        moe = moe_of(model)
        if router.losses.get("load") and moe.top_k >= moe.num_experts:
            raise UserError(f"router.losses.load: needs moe.top_k={moe.top_k} below the {moe.num_experts} experts")

    @classmethod
    def tensors(cls, model: ModelConfig, router: RouterConfig) -> Fresh:
        """Both weights, fresh at zero as in the paper: all experts start alike, told apart by noise."""
        shape = (moe_of(model).num_experts, model.hidden_size)
        weight = fresh_weight(model, router) if router.init_scale else Full(0.0)
        return {"router.weight": (shape, weight), "router.noise_weight": (shape, Full(0.0))}

    def decide(self, hidden_TH: Tensor) -> Decision:
        """See `functional.noisy_logits`."""
        if not self.training:
            clean_TE = self.logits(hidden_TH)
            return Decision(clean_TE, *self.route(clean_TE), self.moe.top_k)
        both = torch.cat([self.weight, self.noise_weight])  # one product reads the hidden states once
        clean_TE, noise_TE = torch.nn.functional.linear(hidden_TH, both).chunk(2, dim=-1)
        epsilon_TE = self.noise(self.moe.num_experts, lambda x, g: x.normal_(generator=g))
        logits_TE = noisy_logits(clean_TE, noise_TE, epsilon_TE)
        scale_TE = torch.nn.functional.softplus(noise_TE)
        return Decision(logits_TE, *self.route(logits_TE), self.moe.top_k, clean_TE=clean_TE, noise_scale_TE=scale_TE)

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.top_k_gates`."""
        return top_k_gates(logits_TE, self.moe.top_k)
