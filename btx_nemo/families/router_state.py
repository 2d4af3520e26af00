"""What each router keeps in a checkpoint, per layer: names and shapes, known without importing Megatron.

A router from outside the package that keeps more than a weight says so with `register_router_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from btx_nemo.families.config import ModelConfig, MoEConfig

State = dict[str, tuple[int, ...]]
"""Tensor -> shape; the Megatron key is `...mlp.router.TENSOR`, the shared name `...mlp.gate.TENSOR`."""


def _weight(model: ModelConfig, moe: MoEConfig) -> State:
    return {"weight": (moe.num_experts, model.hidden_size)}


def _noisy(model: ModelConfig, moe: MoEConfig) -> State:
    return {**_weight(model, moe), "noise_weight": (moe.num_experts, model.hidden_size)}


def _flexolmo(model: ModelConfig, moe: MoEConfig) -> State:
    return {**_weight(model, moe), **({"penalty": (moe.num_experts - 1,)} if moe.options.get("bias") else {})}


def _nexus(model: ModelConfig, moe: MoEConfig) -> State:
    size: Any = moe.options.get("embedding_size")
    size = size if type(size) is int and size > 0 else 1  # a wrong one is the router's to refuse
    return {
        "w1": (2 * model.hidden_size, size),
        "w2": (model.hidden_size, model.hidden_size),
        "domain_embeddings": (moe.num_experts, size),
    }


_STATES: dict[str, Callable[[ModelConfig, MoEConfig], State]] = {
    "noisy_top_k": _noisy,
    "flexolmo": _flexolmo,
    "nexus": _nexus,
}


def register_router_state(router: str, state: Callable[[ModelConfig, MoEConfig], State]) -> None:
    """Says what a router keeps; without it, a weight [num_experts, hidden_size]. Raises ValueError for a taken name."""
    if router in _STATES:
        raise ValueError(f"router {router!r} has its state registered already")
    _STATES[router] = state


def router_state(model: ModelConfig) -> State:
    """What the router of one layer keeps; nothing in a dense model."""
    if model.moe is None:
        return {}
    return _STATES.get(model.moe.router, _weight)(model, model.moe)
