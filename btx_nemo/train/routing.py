"""Routing statistics of the whole model, gathered from the routers of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.platform import device


@dataclass(frozen=True)
class Routing:
    """Shares of tokens per layer and expert, and the mean balance loss."""

    load: list[list[float]]
    """[layer][expert]: share of all token-to-expert assignments; a layer sums to one."""
    balance_loss: float | None
    """Mean over layers and micro-batches, without its weight; None where none was computed."""


def routers(gpt: Any) -> list[Any]:
    """This rank's routers."""
    from btx_nemo.routers.base import BaseRouter

    return [module for module in gpt.modules() if isinstance(module, BaseRouter)]


def reset_routing(gpt: Any) -> None:
    """Forgets what was counted."""
    for router in routers(gpt):
        router.statistics.reset()


@contextlib.contextmanager
def separate_routing(gpt: Any) -> Iterator[None]:
    """Counts apart while entered, as validation does in the midst of training."""
    from btx_nemo.routers.base import RoutingStatistics

    before = [(router, router.statistics) for router in routers(gpt)]
    for router, statistics in before:
        router.statistics = RoutingStatistics(statistics.num_experts)
    yield
    for router, statistics in before:
        router.statistics = statistics


def collect_routing(gpt: Any, model: ModelConfig) -> Routing | None:
    """What all routers did since the last reset, the same on every rank; None for a dense model. Collective."""
    if model.moe is None:
        return None
    tokens_LE = torch.zeros(model.num_layers, model.moe.num_experts, dtype=torch.float64)
    losses = torch.zeros(2, dtype=torch.float64)
    for router in routers(gpt):
        tokens_E, loss_sum, loss_count = router.statistics.collect()
        tokens_LE[router.layer_number - 1] += tokens_E
        losses += torch.tensor([loss_sum, loss_count], dtype=torch.float64)
    flat = torch.cat([tokens_LE.flatten(), losses]).to(device())
    dist.all_reduce(flat)
    flat = flat.cpu()
    tokens_LE, losses = flat[:-2].view_as(tokens_LE), flat[-2:]
    load_LE = tokens_LE / tokens_LE.sum(dim=1, keepdim=True).clamp(min=1)
    return Routing(load=load_LE.tolist(), balance_loss=(losses[0] / losses[1]).item() if losses[1] else None)
