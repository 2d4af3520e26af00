"""upgrade: experts of a mixture replaced by newer ones of the same names; everything else stays to the bit.

A two-expert model brings its router row. A BAR mixture's averages of shared tensors are made again (section 3.4).
"""

from __future__ import annotations

from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.mix.operations.base import (
    Options,
    changed,
    check_whole_blocks,
    domain_block,
    moe_of,
    number_of,
    pairs_of,
    same_anchors,
    shared_with_pairs,
)
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.flexolmo import row
from btx_nemo.mix.recipes.two_expert import ANCHOR
from btx_nemo.plan.expr import Concat, Expr, Take


@register("upgrade", Options, pairs="either", on_mixture=True, routed=False)
def upgrade(given: Ingredients) -> Mixture:
    """Plan the mixture with other blocks for the experts that are named."""
    moe = moe_of(given)
    check_whole_blocks(moe, "upgrade")
    if ANCHOR in given.experts:
        raise UserError(f"experts.{ANCHOR}: all experts were trained beside the anchor; train and merge them again")
    newer = {number_of(moe, name): name for name in given.experts}
    shared, pairs = shared_with_pairs(given, "upgrade"), pairs_of(given)

    def expert(layer: int, number: int, part: str) -> Expr:
        if number in newer:
            return domain_block(given, newer[number], layer, part)
        return Take(given.seed, names.expert(layer, number, part))

    def router(target: str) -> Expr:
        if not pairs:
            return Take(given.seed, target)
        rows = range(len(moe.experts))
        sources = [(newer[n], 1) if newer.get(n) in pairs else (given.seed, n) for n in rows]
        return Concat(tuple(row(source, target, number) for source, number in sources))

    return changed(
        given,
        moe,
        expert,
        router,
        shared=shared,
        same=same_anchors(given, moe, shared),
        unused="replaced by the upgrade",
        retrain="train the router",
    )
