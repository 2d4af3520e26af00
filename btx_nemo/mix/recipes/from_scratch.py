"""A fresh mixture of the seed's shape: the baseline that says what the specialists' training was worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, mixture_of, plan_of
from btx_nemo.plan.expr import Expr, Full, Normal


@dataclass(frozen=True)
class Options:
    """As large as Branch-Train-MiX's mixture of three specialists and the seed."""

    num_experts: int = 4
    """Experts of a layer."""


@register("from_scratch", Options, takes="none")
def from_scratch(given: Ingredients) -> Mixture:
    """N(0, init_std^2), over sqrt(2 L) where a layer writes to the residual stream; norms one, biases zero."""
    count, depth, std = given.settings(Options).num_experts, given.model.num_layers, given.model.init_std
    if count < 1:
        raise UserError(f"num_experts={count} must be at least 1")

    def weights(name: str) -> Expr:
        if "norm" in name:
            return Full(1.0)
        if name.endswith(".bias"):
            return Full(0.0)
        return Normal(std / math.sqrt(2 * depth) if name.endswith(("o_proj.weight", "down_proj.weight")) else std)

    moe = MoEConfig(num_experts=count, top_k=given.choose_top_k(2, count))
    model = mixture_of(given, moe)
    parts = Parts(
        rest=weights,
        expert=lambda layer, number, part: weights(f"{part}_proj.weight"),
        router=lambda _: Normal(given.std(std)),
    )
    unused = {given.seed: "only its architecture is taken (recipe=from_scratch)"}
    return Mixture(plan=plan_of(given, model, parts, unused), model=model, retrain="train the mixture")
