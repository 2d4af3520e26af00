"""`soft`: Branch-Train-MiX's Soft routing (section 4.3.1), every token to every expert."""

from __future__ import annotations

from torch import Tensor

from btx_nemo.families.config import MoEConfig
from btx_nemo.routers.base import BaseRouter
from btx_nemo.routers.functional import soft_gates


class SoftRouter(BaseRouter):
    """Weights all experts by the softmax; `moe.top_k` does not matter."""

    @classmethod
    def experts_per_token(cls, moe: MoEConfig) -> int:
        """All."""
        return moe.num_experts

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.soft_gates`."""
        return soft_gates(logits_TE)
