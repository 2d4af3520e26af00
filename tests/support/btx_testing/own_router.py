"""The example of docs/routers.md: a router of one's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from btx_nemo.routers.base import BaseRouter
from btx_nemo.routers.functional import softmax_over


class FirstExperts(BaseRouter):
    """Every token to the first `moe.top_k` experts, weighted by the softmax over these."""

    @dataclass(frozen=True)
    class Options:
        """None."""

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Gates and selection, both [T, E]."""
        selected_TE = torch.zeros_like(logits_TE, dtype=torch.bool)
        selected_TE[:, : self.moe.top_k] = True
        return softmax_over(logits_TE, selected_TE), selected_TE
