"""An exponential moving average of the weights that train (EMA), off by default.

After step t it is the mean of the weights after steps 1 to t, step i with a weight in proportion to decay^(t - i): the
usual average without its bias towards where it began. It is kept in fp32 and taken of the optimizer's main weights,
since a bf16 weight does not show a small step. Each rank has the average of what it has the main weights of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from btx_nemo.checkpoints.torch_dist import AVERAGES
from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.megatron.platform import device
from btx_nemo.train.optimizer_state import main_weight, optimizers, owned


def check_ema(config: TrainConfig) -> None:
    """Raises UserError for a decay that is none."""
    if not 0 <= config.ema.decay < 1:
        raise UserError(f"ema.decay={config.ema.decay}: must lie between 0 (off) and 1, without 1")


class Average:
    """This rank's part of the average."""

    def __init__(self, decay: float, optimizer: Any):
        self.decay, self.optimizer = decay, optimizer
        here = [(part, *found) for part in optimizers(optimizer) for found in owned(part)]
        self._weights = [main_weight(part, parameter).detach() for part, _, parameter, _ in here]
        self._averages = [weight.clone() for weight in self._weights]  # before the first step: the weights
        self._held = {parameter: (where, mine) for (*_, parameter, where), mine in zip(here, self._averages)}

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """After an optimizer step that was taken, the run's number `steps` (from 1)."""
        if self._averages:
            torch._foreach_lerp_(self._averages, self._weights, (1 - self.decay) / (1 - self.decay**steps))

    def sharded_state(self, model_state: dict[str, Any], frozen: Sequence[Any], *, loading: bool) -> dict[int, Any]:
        """ShardedTensors of the averages, whole, as Megatron's checkpoints take and fill them. Collective.

        To be saved, only the first of the data-parallel ranks, which writes them, has them; to be loaded, all.
        `model_state` is the model's sharded state dict, whose tensors are the parameters themselves, and `frozen` what
        `of_frozen_experts` says of it: each of these is its own average.
        """
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

        pieces = {id(getattr(piece, "data", None)): piece for piece in nested_values(model_state)}
        state = [(pieces[id(p)], self._whole(part, p, loading)) for part, p in self._parameters()]
        state += [(piece, piece.data.detach().cpu().float()) for piece in frozen]
        prefix = AVERAGES.removesuffix(".")
        there = [(piece, whole) for piece, whole in state if whole is not None]
        return dict(enumerate(make_sharded_optimizer_tensor(piece, whole, prefix) for piece, whole in there))

    @torch.no_grad()
    def load(self, states: dict[int, Any]) -> None:
        """Takes what `sharded_state` described and a checkpoint filled."""
        for number, (_, parameter) in enumerate(self._parameters()):
            if parameter in self._held:
                where, mine = self._held[parameter]
                mine.copy_(states[number].flatten()[where])

    def _parameters(self) -> list[tuple[Any, torch.nn.Parameter]]:
        """All that train here, with their optimizer, in one order on all ranks that share them."""
        parts = optimizers(self.optimizer)
        return [(part, parameter) for part in parts for buffer in part.buffers for parameter in buffer.param_index_map]

    def _whole(self, part: Any, parameter: torch.nn.Parameter, loading: bool) -> torch.Tensor | None:
        """The average of a parameter, put together on the host of the first of the ranks that share it."""
        if loading:
            return torch.empty(parameter.shape, dtype=torch.float32)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=device())
        if parameter in self._held:
            where, mine = self._held[parameter]
            whole[where] = mine.to(whole.device)
        first = dist.get_process_group_ranks(part.data_parallel_group)[0]
        dist.reduce(whole.view(torch.int32), first, group=part.data_parallel_group)  # each bit is of one rank: exact
        return whole.view(parameter.shape).cpu() if dist.get_rank() == first else None
