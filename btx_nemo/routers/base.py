"""The router that Megatron's MoELayer calls: fp32 logits, a routing rule, a balance loss, statistics.

Shape suffixes: S sequence (of this rank), B micro-batch, H hidden, T = S * B tokens, E experts.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from btx_nemo.config.schema import RouterConfig
from btx_nemo.families.config import MoEConfig
from btx_nemo.routers.losses import btx_load_balance


class BaseRouter(Router):
    """Base of all routers: subclasses implement `route`.

    Built by Megatron's MoELayer through `MoESubmodules(router=functools.partial(Subclass, moe=..., options=...))`;
    keywords that only some Megatron versions pass go on to its own base class.
    """

    def __init__(self, config: Any, pg_collection: Any = None, *, moe: MoEConfig, options: RouterConfig, **kwargs: Any):
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.moe = moe
        self.options = options
        self.statistics = RoutingStatistics(moe.num_experts)

    @abstractmethod
    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Gates [T, E] (zero where not selected) and the boolean selection [T, E]."""

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Routes [S, B, H] hidden states; returns fp32 gates and the selection, both [T, E]."""
        if padding_mask is not None:
            raise ValueError("padding masks are not supported by the routers yet")
        hidden_TH = input.reshape(-1, input.shape[-1])
        logits_TE = torch.nn.functional.linear(hidden_TH.float(), self.weight.float())
        gates_TE, selected_TE = self.route(logits_TE)
        loss = None
        if self.training and torch.is_grad_enabled() and self.options.loss != "none":
            loss = self.balance_loss(gates_TE, logits_TE)
            if self.options.aux_loss_coeff > 0:
                gates_TE = MoEAuxLossAutoScaler.apply(gates_TE, self.options.aux_loss_coeff * loss)
        if torch.is_grad_enabled() or not self.training:  # once a micro-batch, recomputation or not
            self.statistics.add(selected_TE, loss)
        return gates_TE, selected_TE

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Megatron's name for `route`."""
        return self.route(logits)

    def balance_loss(self, gates_TE: Tensor, logits_TE: Tensor) -> Tensor:
        """The micro-batch's balance loss, without its weight; the same number on all ranks that share its tokens."""
        return btx_load_balance(
            gates_TE, logits_TE, detach_u=self.options.detach_u, mean_over_ranks=self._mean_over_ranks
        )

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        # Sequence parallelism leaves each rank an equal share of the tokens. Backward passes each rank's gradient on
        # as it is: every rank has the whole loss, and Megatron sums the router's gradient over these ranks.
        return reduce_from_tensor_model_parallel_region(x, group=self.tp_cp_group) / self.tp_cp_group.size()


class RoutingStatistics:
    """What a router did since the last `reset`: plain tensors on its device, no part of any checkpoint."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._tokens_E: Tensor | int = 0
        self._loss_sum: Tensor | int = 0
        self._loss_count = 0

    def add(self, selected_TE: Tensor, loss: Tensor | None) -> None:
        """Counts one micro-batch, without waiting for the device."""
        self._tokens_E = self._tokens_E + selected_TE.detach().sum(dim=0)
        if loss is not None:
            self._loss_sum = self._loss_sum + loss.detach()
            self._loss_count += 1

    def collect(self) -> tuple[Tensor, float, int]:
        """Tokens per expert [E] (float64, on the CPU), and the sum and the number of the balance losses."""
        tokens_E = torch.zeros(self.num_experts, dtype=torch.float64)
        tokens_E += torch.as_tensor(self._tokens_E).cpu()
        return tokens_E, float(self._loss_sum), self._loss_count
