"""Upcycling into fine-grained experts (He et al., 2024, arXiv 2410.07524): virtual groups and weight scaling.

Copy c of the dense block, cut into G shards, becomes experts c G ... c G + G - 1, whose router rows are equal at first:
their logits tie, so that a top-k which is a multiple of G takes whole copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.config.choice import check_choice
from btx_nemo.errors import UserError
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import (
    Parts,
    chunk,
    ffn,
    fresh_rows,
    mixture_of,
    plan_of,
    repeated_rows,
    scaled,
    width_of,
)
from btx_nemo.plan.expr import Expr, Take


@dataclass(frozen=True)
class Options:
    """The paper's E8G8T8 (its top_k is the granularity), softmax first."""

    expansion: int = 8
    """E: copies of the dense block."""
    granularity: int = 8
    """G: shards of a copy."""
    softmax: str = "before"
    """before: over all experts, then top-k, not renormalised (the paper's). after: over the k kept."""
    scale: str = "cuberoot"
    """cuberoot: gate, up and down times s^(1/3) (the paper's; approximate for SwiGLU). exact_down: down times s. none.

    s is E G^2 / k with the softmax before and G with it after. Only `after` is exact for every router.
    """


def activation_scale(expansion: int, granularity: int, top_k: int, softmax: str) -> float:
    """s: what the experts' outputs must be multiplied by so that their weighted sum is the dense block's (eq. 2)."""
    return expansion * granularity**2 / top_k if softmax == "before" else float(granularity)


def part_scale(mode: str, scale: float, part: str) -> float:
    """The factor of one matrix of a SwiGLU block whose output is to be `scale` times as large."""
    if mode == "cuberoot":
        return scale ** (1 / 3)
    return scale if mode == "exact_down" and part == "down" else 1.0


@register("nvidia_upcycling", Options, takes="none")
def nvidia_upcycling(given: Ingredients) -> Mixture:
    """Plan a mixture of E copies of G shards each."""
    options = given.settings(Options)
    check_choice("softmax", options.softmax, ("before", "after"))
    check_choice("scale", options.scale, ("cuberoot", "exact_down", "none"))
    copies, shards = options.expansion, options.granularity
    if copies < 1:
        raise UserError(f"expansion={copies} must be at least 1")
    width, count = width_of(given, shards, "granularity"), copies * shards
    top_k = given.choose_top_k(shards, count)
    if top_k % shards:
        raise UserError(f"top_k={top_k} is no multiple of granularity={shards}, so tokens would get parts of copies")
    scale = activation_scale(copies, shards, top_k, options.softmax)
    before = options.softmax == "before"
    moe = MoEConfig(
        num_experts=count,
        top_k=top_k,
        options={"softmax": "before", "renormalise": False} if before else {},
        experts=[f"copy.{number // shards}.{number % shards}" for number in range(count)],
    )

    def expert(layer: int, number: int, part: str) -> Expr:
        shard = chunk(ffn(given.seed, layer, part), part, number % shards, width)
        return scaled(shard, part_scale(options.scale, scale, part))

    def router(target: str) -> Expr:
        rows = fresh_rows(given, target, count, given.std())
        return repeated_rows(rows, [number // shards for number in range(count)])

    model = mixture_of(given, moe, width)
    parts = Parts(rest=lambda name: Take(given.seed, name), expert=expert, router=router)
    return Mixture(plan=plan_of(given, model, parts, {}), model=model, retrain="train the mixture")
