"""Branch-Train-MiX (Sukhbaatar et al., 2024, arXiv 2403.07816, section 3.2).

Every specialist's feed-forward blocks become experts, the seed's too (the generalist); all other tensors are the
uniform mean over the same models; routers are fresh.
"""

from __future__ import annotations

import dataclasses

from btx_nemo.families import base, names
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.plan.expr import Expr, Mean, Normal, Take
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan


@register("btx")
def btx(given: Ingredients) -> Mixture:
    """Plan a mixture whose experts are the specialists in order, then the seed when `include_seed`."""
    members = (*given.experts, given.seed) if given.include_seed else given.experts
    labels = [*given.experts, "generalist"] if given.include_seed else list(given.experts)
    moe = MoEConfig(num_experts=len(members), top_k=given.top_k, experts=labels)
    model = dataclasses.replace(given.model, moe=moe)
    reference = given.layouts[given.seed]
    jobs = []
    for target, info in base.layout(model, "float32").items():
        expr, like = _expression(target, members, given.router_init_std)
        dtype = given.dtype or reference[like].dtype
        jobs.append(Job(target, TensorInfo(info.shape, dtype), expr))
    dropped = {}
    if not given.include_seed:
        dropped = {(given.seed, name): "the seed is not an expert (include_seed=false)" for name in reference}
    return Mixture(Plan(tuple(jobs), given.layouts, dropped), model)


def _expression(target: str, members: tuple[str, ...], router_std: float) -> tuple[Expr, str]:
    """The expression of one tensor, and the dense tensor whose dtype it takes."""
    expert = names.parse_expert(target)
    if expert:
        layer, number, part = expert
        name = names.ffn(layer, part)
        return Take(members[number], name), name
    if names.parse_router(target):
        return Normal(router_std), "model.embed_tokens.weight"
    return Mean(tuple(Take(member, target) for member in members)), target
