"""add: further experts for a mixture. Their router rows are fresh, or a two-expert model's; all other rows stay.

Shared tensors stay too, unless a BAR mixture has kept its experts' aside: then they are averaged again (section 3.4).
"""

from __future__ import annotations

import dataclasses

from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.mix.operations.base import (
    Options,
    changed,
    check_whole_blocks,
    domain_block,
    moe_of,
    pairs_of,
    same_anchors,
    shared_with_pairs,
)
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.flexolmo import row
from btx_nemo.mix.recipes.parts import fresh_rows
from btx_nemo.plan.expr import Concat, Expr, Take


@register("add", Options, pairs="either", on_mixture=True)
def add(given: Ingredients) -> Mixture:
    """Plan the mixture with the specialists after its own experts."""
    moe, count = moe_of(given), len(moe_of(given).experts)
    check_whole_blocks(moe, "add")
    for name in given.experts:
        if name in moe.experts:
            raise UserError(f"experts.{name}: the mixture has an expert of that name; use recipe=upgrade")
    shared = shared_with_pairs(given, "add")

    def expert(layer: int, number: int, part: str) -> Expr:
        if number < count:
            return Take(given.seed, names.expert(layer, number, part))
        return domain_block(given, given.experts[number - count], layer, part)

    std = 0.0 if moe.router == "noisy_top_k" else given.std(given.model.init_std)  # that one starts at zero

    def router(target: str) -> Expr:
        rows = [
            row(name, target, 1) if name in pairs_of(given) else fresh_rows(given, target, 1, std, f"/{name}")
            for name in given.experts
        ]
        return Concat((Take(given.seed, target), *rows))

    labels = [*moe.experts, *given.experts]
    larger = dataclasses.replace(moe, num_experts=len(labels), experts=labels)
    larger = dataclasses.replace(larger, top_k=given.choose_top_k(moe.top_k, len(labels)))
    return changed(
        given,
        larger,
        expert,
        router,
        shared=shared,
        same=same_anchors(given, moe, shared),
        unused="averaged again with the new experts",
        retrain="train the router"
        + ("; the averages of shared tensors have changed for all experts" if shared else "; all else may stay frozen"),
    )
