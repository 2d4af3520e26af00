"""The names of a model's tensors that all parts of the project share, whatever the files of a model call them.

They are Hugging Face's Llama names; a mixture's are those of Qwen, OLMo and most others:

    model.layers.{i}.mlp.gate.weight                                   the router (and what else a router keeps)
    model.layers.{i}.mlp.experts.{e}.{gate,up,down}_proj.weight        routed experts
    model.layers.{i}.mlp.shared_expert.{gate,up,down}_proj.weight      the expert that every token passes
    model.layers.{i}.mlp.shared_expert_gate.weight                     its sigmoid gate, where it has one
"""

from __future__ import annotations

import re

PARTS = ("gate", "up", "down")
"""The matrices of a gated feed-forward block: silu(gate x) * (up x), then down."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_FFN = re.compile(r"mlp\.(gate|up|down)_proj\.weight")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_SHARED = re.compile(r"mlp\.shared_expert\.(gate|up|down)_proj\.weight")
_ROUTER = re.compile(r"mlp\.gate\.(\w+)")


def ffn(layer: int, part: str) -> str:
    """A matrix of a dense layer's feed-forward block."""
    return f"model.layers.{layer}.mlp.{part}_proj.weight"


def expert(layer: int, number: int, part: str) -> str:
    """A matrix of a routed expert."""
    return f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"


def shared_expert(layer: int, part: str) -> str:
    """A matrix of the shared expert."""
    return f"model.layers.{layer}.mlp.shared_expert.{part}_proj.weight"


def shared_expert_gate(layer: int) -> str:
    """The weight of the shared expert's sigmoid gate."""
    return f"model.layers.{layer}.mlp.shared_expert_gate.weight"


def router(layer: int, tensor: str = "weight") -> str:
    """A tensor of the router."""
    return f"model.layers.{layer}.mlp.gate.{tensor}"


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None for those outside of the layers."""
    found = _LAYER.fullmatch(name)
    return int(found[1]) if found else None


def parse_ffn(name: str) -> tuple[int, str] | None:
    """(layer, part) of a dense feed-forward matrix, else None."""
    found = _within(name, _FFN)
    return (found[0], found[1][1]) if found else None


def parse_expert(name: str) -> tuple[int, int, str] | None:
    """(layer, expert, part) of a routed expert's matrix, else None."""
    found = _within(name, _EXPERT)
    return (found[0], int(found[1][1]), found[1][2]) if found else None


def parse_shared_expert(name: str) -> tuple[int, str] | None:
    """(layer, part) of the shared expert's matrix, else None."""
    found = _within(name, _SHARED)
    return (found[0], found[1][1]) if found else None


def parse_router(name: str) -> tuple[int, str] | None:
    """(layer, tensor) of a router's tensor, else None."""
    found = _within(name, _ROUTER)
    return (found[0], found[1][1]) if found else None


def _within(name: str, pattern: re.Pattern[str]) -> tuple[int, re.Match[str]] | None:
    outer = _LAYER.fullmatch(name)
    inner = pattern.fullmatch(outer[2]) if outer else None
    return (int(outer[1]), inner) if outer and inner else None
