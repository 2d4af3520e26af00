"""`sample_top1`: Branch-Train-MiX's Sample Top-1 (section 4.3.1), Gumbel-softmax with a falling temperature."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from btx_nemo.config.choice import check_choice
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.routers.base import BaseRouter, moe_of
from btx_nemo.routers.functional import hard_top1_gates, sample_top1_gates, soft_gates, temperature
from btx_nemo.routers.losses import Decision


def _gumbel(x: Tensor, generator: object) -> Tensor:
    return x.exponential_(generator=generator).log_().neg_()  # type: ignore[arg-type]


class SampleTop1Router(BaseRouter):
    """One expert a token, its gate softmax((z + Gumbel) / tau); soft routing in the first layer, always.

    tau follows the number of optimizer steps, so a resumed run goes on where it was. At inference the gate is one.
    """

    @dataclass(frozen=True)
    class Options:
        """What happens outside of training."""

        inference: str = "argmax"
        """argmax (the same answer every time) or hard (the paper's: argmax of the logits with Gumbel noise)."""

    only_top_k = 1
    variable_selection = True

    @classmethod
    def check(cls, model: ModelConfig) -> None:
        """See the base."""
        super().check(model)
        check_choice("moe.options.inference", cls.options_of(moe_of(model)).inference, ("argmax", "hard"))

    @classmethod
    def mean_experts_per_token(cls, moe: MoEConfig, layer: int) -> float:
        """All in the first layer."""
        return moe.num_experts if layer == 0 else 1

    def decide(self, hidden_TH: Tensor) -> Decision:
        """As in training, at inference, or in the first layer."""
        logits_TE = self.logits(hidden_TH)
        if self.layer_number == 1:
            return Decision(logits_TE, *soft_gates(logits_TE), self.moe.num_experts)
        if not self.training and self.settings.inference == "argmax":
            return Decision(logits_TE, *hard_top1_gates(logits_TE), 1)
        return Decision(logits_TE, *self.route(logits_TE), 1)

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """With noise: `functional.sample_top1_gates` in training, a gate of one otherwise."""
        noise_TE = self.noise(self.moe.num_experts, _gumbel)
        if not self.training:
            return hard_top1_gates(logits_TE + noise_TE)
        return sample_top1_gates(logits_TE, noise_TE, temperature(self.step))
