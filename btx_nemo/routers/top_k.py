"""The `top_k` router of Branch-Train-MiX (section 3.2): softmax over the k kept logits."""

from __future__ import annotations

from torch import Tensor

from btx_nemo.routers.base import BaseRouter
from btx_nemo.routers.functional import top_k_gates


class TopKRouter(BaseRouter):
    """Sends each token to its k largest logits, weighted by the softmax over these k."""

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.top_k_gates`."""
        return top_k_gates(logits_TE, self.moe.top_k)
