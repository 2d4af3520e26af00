"""Routing statistics of the whole model, gathered from the routers of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.platform import device
from btx_nemo.routers.losses import LOSSES
from btx_nemo.routers.statistics import RoutingStatistics, Sums


@dataclass(frozen=True)
class Routing:
    """What the routers did, per layer, over all ranks; counted before any token is dropped. Zero in dense layers."""

    load: list[list[float]]
    """[layer][expert]: share of all token-to-expert assignments; a layer sums to one."""
    mean_gate: list[list[float]]
    """[layer][expert]: gate averaged over all tokens, zero where not selected."""
    entropy: list[float]
    """[layer]: mean entropy (nats) of the softmax over all experts; ln N when undecided."""
    coactivation: list[list[list[float]]]
    """[layer][expert][expert]: share of the tokens that both experts get."""
    dropped: list[float]
    """[layer]: share of the assignments that found no place."""
    logit_rms: list[float]
    """[layer]: root mean square of the router logits."""
    losses: dict[str, list[float]]
    """Name -> [layer]: mean over micro-batches, without the weight; empty where none was computed."""

    @property
    def dead(self) -> list[tuple[int, int]]:
        """(layer, expert) of experts that no token chose, layers from zero."""
        return [(i, e) for i, row in enumerate(self.load) for e, share in enumerate(row) if share == 0 and any(row)]

    def record(self) -> dict[str, Any]:
        """As metrics.jsonl has it."""
        return {
            "expert_load": self.load,
            "routing": {
                "mean_gate": self.mean_gate,
                "entropy": self.entropy,
                "coactivation": self.coactivation,
                "dropped": self.dropped,
                "logit_rms": self.logit_rms,
                "dead": [list(pair) for pair in self.dead],
            },
            "router_losses": self.losses,
        }


def routers(gpt: Any) -> list[Any]:
    """This rank's routers."""
    from btx_nemo.routers.base import BaseRouter

    return [module for module in gpt.modules() if isinstance(module, BaseRouter)]


def frozen_with_losses(gpt: Any) -> bool:
    """Whether a router here has losses but nothing to train: they then move only what comes before it."""
    return any(r.losses and not any(p.requires_grad for p in r.parameters()) for r in routers(gpt))


def reset_routing(gpt: Any) -> None:
    """Forgets what was counted."""
    for router in routers(gpt):
        router.statistics.reset()


@contextlib.contextmanager
def separate_routing(gpt: Any) -> Iterator[None]:
    """Counts apart while entered, as validation does in the midst of training."""
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
    experts = model.moe.num_experts
    flat_LX = torch.zeros(model.num_layers, Sums.zero(experts).flat().numel(), dtype=torch.float64)
    for router in routers(gpt):
        flat_LX[router.layer_number - 1] = router.statistics.collect().flat()
    flat_LX = flat_LX.to(device())
    dist.all_reduce(flat_LX)
    return _routing([Sums.unflatten(row, experts) for row in flat_LX.cpu()])


def _routing(layers: list[Sums]) -> Routing:
    def per_token(value: Tensor, sums: Sums) -> Any:
        return (value / sums.tokens.clamp(min=1)).tolist()

    counted_LX = torch.stack([s.micro_batches for s in layers])
    names = {name: i for i, name in enumerate(LOSSES) if counted_LX[:, i].any()}
    return Routing(
        load=[(s.selected / s.selected.sum().clamp(min=1)).tolist() for s in layers],
        mean_gate=[per_token(s.gates, s) for s in layers],
        entropy=[per_token(s.entropy, s) for s in layers],
        coactivation=[per_token(s.together, s) for s in layers],
        dropped=[(s.dropped / s.selected.sum().clamp(min=1)).item() for s in layers],
        logit_rms=[per_token(s.squares / s.selected.numel(), s) ** 0.5 for s in layers],
        losses={n: [(s.losses[i] / s.micro_batches[i].clamp(min=1)).item() for s in layers] for n, i in names.items()},
    )
