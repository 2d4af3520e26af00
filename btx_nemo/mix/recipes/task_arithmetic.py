"""Task arithmetic (Ilharco et al., 2023, arXiv 2212.04089): the seed plus the sum of all changes, scaled."""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, check_number, plan_of
from btx_nemo.plan.expr import Combine, Expr, Take


@dataclass(frozen=True)
class Options:
    """How much of the changes."""

    scale: float = 0.4
    """lambda."""


def difference(source: str, seed: str, name: str) -> Expr:
    """A specialist's tensor minus the seed's, the task vector."""
    return Combine((Take(source, name), Take(seed, name)), (1.0, -1.0))


@register("task_arithmetic", Options, routed=False)
def task_arithmetic(given: Ingredients) -> Mixture:
    """Plan seed + scale * sum of (specialist - seed)."""
    scale = given.settings(Options).scale
    check_number("scale", scale, -100, 100)

    def rest(name: str) -> Expr:
        parts = (Take(given.seed, name), *(difference(expert, given.seed, name) for expert in given.experts))
        return Combine(parts, (1.0, *(scale for _ in given.experts)))

    return Mixture(plan=plan_of(given, given.model, Parts(rest=rest), {}), model=given.model)
