"""DARE (Yu et al., 2024, arXiv 2311.03099): drop a random share of each specialist's changes, rescale the rest, add."""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, check_number, plan_of
from btx_nemo.mix.recipes.task_arithmetic import difference
from btx_nemo.plan.expr import Bernoulli, Combine, Expr, Product, Take


@dataclass(frozen=True)
class Options:
    """The paper's choices."""

    drop: float = 0.9
    """p: chance that a change is dropped; those that stay are divided by 1 - p."""
    scale: float = 1.0
    """lambda of the sum."""


@register("dare", Options, routed=False)
def dare(given: Ingredients) -> Mixture:
    """Plan seed + scale / (1 - p) * sum of mask * (specialist - seed)."""
    options, seed = given.settings(Options), given.seed
    check_number("scale", options.scale, -100, 100)
    if not 0 <= options.drop < 1:
        raise UserError(f"drop={options.drop:g} must be from 0 to less than 1")
    weight = options.scale / (1 - options.drop)

    def kept(expert: str, name: str) -> Expr:
        mask = Bernoulli(1 - options.drop, key=f"{name}/{expert}", info=given.layouts[expert][name])
        return Product((mask, difference(expert, seed, name)))

    def rest(name: str) -> Expr:
        parts = (Take(seed, name), *(kept(expert, name) for expert in given.experts))
        return Combine(parts, (1.0, *(weight for _ in given.experts)))

    return Mixture(plan=plan_of(given, given.model, Parts(rest=rest), {}), model=given.model)
