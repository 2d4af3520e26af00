"""Drop-Upcycling (Nakamura et al., 2025, arXiv 2502.19261): copies of which some neurons are drawn anew.

Of each expert's neurons a share r is chosen; their rows of gate and up and their columns of down are drawn from a
normal with the mean and the standard deviation that the chosen part of the dense matrix has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, axis, check_number, chunk, ffn, mixture_of, plan_of, width_of
from btx_nemo.plan.expr import Choice, Combine, Expr, Full, Normal, Splice, Take, Uniform
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.statistics import Moments, Statistic


@dataclass(frozen=True)
class Options:
    """The paper's choices: 8 experts, top-2, r = 0.5, the same neurons in the three matrices."""

    copies: int = 8
    """Experts of a layer; of whole blocks, with granularity."""
    ratio: float = 0.5
    """r: share of an expert's neurons that are drawn anew; 0 is sparse upcycling."""
    independent: bool = False
    """Choose the neurons of each matrix by themselves, as the authors' scripts do."""
    granularity: int = 1
    """Shards of each copy, which become experts of their own (the fine-grained variant)."""


@register("drop_upcycling", Options, takes="none")
def drop_upcycling(given: Ingredients) -> Mixture:
    """Plan a mixture of partly re-initialised copies; routers are uniform with a standard deviation of 0.02."""
    options, shards = given.settings(Options), given.settings(Options).granularity
    check_number("ratio", options.ratio, 0, 1)
    if options.copies < 1:
        raise UserError(f"copies={options.copies} must be at least 1")
    width, count = width_of(given, shards, "granularity"), options.copies * shards
    redrawn = int(options.ratio * width)
    statistics: dict[str, Statistic] = {}

    def expert(layer: int, number: int, part: str) -> Expr:
        whole = ffn(given.seed, layer, part)
        whole = chunk(whole, part, number % shards, width) if shards > 1 else whole
        if not redrawn:
            return whole
        target, dim = names.expert(layer, number, part), axis(part)
        key = target if options.independent else f"model.layers.{layer}.mlp.experts.{number}"
        choice = Choice(f"{key}/neurons", redrawn, width)
        statistics[target] = Moments(whole, dim, choice)
        return Splice(whole, _like(given, target, width, dim), dim, choice)

    moe = MoEConfig(
        num_experts=count,
        top_k=given.choose_top_k(2, count),
        experts=[f"copy.{n // shards}.{n % shards}" if shards > 1 else f"copy.{n}" for n in range(count)],
    )
    model = mixture_of(given, moe, width)
    parts = Parts(
        rest=lambda name: Take(given.seed, name),
        expert=expert,
        router=lambda _: Uniform(given.std() * math.sqrt(12) / 2),
        statistics=statistics,
    )
    return Mixture(plan=plan_of(given, model, parts, {}), model=model, retrain="train the mixture")


def _like(given: Ingredients, target: str, width: int, dim: int) -> Expr:
    """N(mean, std^2) of the target's shape, the two measured."""
    hidden = given.model.hidden_size
    layer, _, part = names.parse_expert(target) or (0, 0, "")
    stored = given.layouts[given.seed][names.ffn(layer, part)].dtype
    info = TensorInfo((hidden, width) if dim else (width, hidden), stored)
    parts = (Full(1.0, info), Normal(1.0, key=target, info=info))
    return Combine(parts, (f"{target}/mean", f"{target}/std"))
