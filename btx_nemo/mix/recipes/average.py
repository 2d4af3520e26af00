"""The uniform mean of the models ("soup", Wortsman et al., 2022, arXiv 2203.05482): one dense model."""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, mean, plan_of


@dataclass(frozen=True)
class Options:
    """Who is averaged."""

    include_seed: bool = False
    """Whether the seed counts too (Nexus's dense merging)."""


@register("average", Options, routed=False)
def average(given: Ingredients) -> Mixture:
    """Plan the mean of the specialists, and the seed with `include_seed`."""
    include_seed = given.settings(Options).include_seed
    members = (*given.experts, given.seed) if include_seed else given.experts
    unused = {} if include_seed else {given.seed: "the seed is not averaged (include_seed=false)"}
    plan = plan_of(given, given.model, Parts(rest=mean(members)), unused)
    return Mixture(plan=plan, model=given.model)
