"""How many parameters a model has, in which parts, and how many of them one token meets."""

from __future__ import annotations

from math import prod
from typing import Any

from btx_nemo.families.config import ModelConfig
from btx_nemo.families.names import parse_expert, parse_router, parse_shared_expert
from btx_nemo.plan.layout import Layout

PARTS = ("embeddings", "attention", "dense", "experts", "shared", "router", "norms", "output")
"""What parameters are counted as: `dense` are feed-forward blocks outside of mixtures."""


def part_of(name: str) -> str:
    """The part that a tensor belongs to, by its shared name."""
    if parse_expert(name):
        return "experts"
    if parse_shared_expert(name) or "shared_expert_gate" in name:
        return "shared"
    if parse_router(name):
        return "router"
    if "norm" in name:
        return "norms"
    if ".self_attn." in name:
        return "attention"
    if ".mlp." in name:
        return "dense"
    return "output" if name.startswith("lm_head") else "embeddings"


def count_parameters(layout: Layout, model: ModelConfig) -> dict[str, Any]:
    """{total, active, parts: {part: {total, active}}}: active is all but the experts that a token is not sent to."""
    parts = dict.fromkeys(PARTS, 0)
    for name, info in layout.items():
        parts[part_of(name)] += prod(info.shape)
    active = dict(parts)
    if model.moe:
        chosen = model.moe.num_experts if model.moe.router == "soft" else model.moe.top_k
        active["experts"] = parts["experts"] // model.moe.num_experts * chosen
    return {
        "total": sum(parts.values()),
        "active": sum(active.values()),
        "parts": {part: {"total": parts[part], "active": active[part]} for part in PARTS if parts[part]},
    }
