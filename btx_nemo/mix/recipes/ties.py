"""TIES-Merging (Yadav et al., 2023, arXiv 2306.01708): trim, elect signs, average what agrees."""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.config.choice import check_choice
from btx_nemo.families import base
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, check_number, plan_of
from btx_nemo.mix.recipes.task_arithmetic import difference
from btx_nemo.plan.expr import Expr, Number, Take, Ties
from btx_nemo.plan.statistics import Majority, Statistic, Threshold


@dataclass(frozen=True)
class Options:
    """The paper's choices."""

    density: float = 0.2
    """Share of a specialist's changes that are kept, the largest in magnitude; equal ones at the border all stay."""
    scale: float = 1.0
    """lambda."""
    scope: str = "model"
    """Over what they are ranked: model (the paper's), or tensor (mergekit's)."""
    zero_sign: str = "majority"
    """Sign where the kept changes cancel: majority (the model's, the paper's) or positive (mergekit's)."""


@register("ties", Options, routed=False)
def ties(given: Ingredients) -> Mixture:
    """Plan the merge; thresholds and the majority sign are measured before it is carried out."""
    options, seed = given.settings(Options), given.seed
    check_number("density", options.density, 0, 1)
    check_number("scale", options.scale, -100, 100)
    check_choice("scope", options.scope, ("model", "tensor"))
    check_choice("zero_sign", options.zero_sign, ("majority", "positive"))
    tensors, statistics = tuple(base.layout(given.model, "float32")), dict[str, Statistic]()

    def threshold(expert: str, name: str) -> str:
        key = f"threshold/{expert}" + ("" if options.scope == "model" else f"/{name}")
        if key not in statistics:
            ranked = tensors if options.scope == "model" else (name,)
            statistics[key] = Threshold(tuple(difference(expert, seed, each) for each in ranked), options.density)
        return key

    def merged(name: str, zero_sign: Number) -> Ties:
        parts = (Take(seed, name), *(Take(expert, name) for expert in given.experts))
        return Ties(parts, tuple(threshold(expert, name) for expert in given.experts), options.scale, zero_sign)

    if options.zero_sign == "majority":
        votes = tuple(merged(name, 1.0) for name in tensors)
        statistics["majority_sign"] = Majority(votes)

    def rest(name: str) -> Expr:
        return merged(name, "majority_sign" if options.zero_sign == "majority" else 1.0)

    parts = Parts(rest=rest, statistics=statistics)
    return Mixture(plan=plan_of(given, given.model, parts, {}), model=given.model)
