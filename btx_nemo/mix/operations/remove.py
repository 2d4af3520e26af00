"""remove: experts taken out of a mixture with their router rows (opting out); the others stay to the bit.

It is as if their logits were minus infinity. A BAR mixture's averages of shared tensors are made again without them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.mix.operations.base import Options as Base
from btx_nemo.mix.operations.base import changed, moe_of, shared_of
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.two_expert import ANCHOR
from btx_nemo.plan.expr import Concat, Expr, Slice, Take


@dataclass(frozen=True, kw_only=True)
class Options(Base):
    """Who leaves."""

    names: list[str]
    """Experts, or whole domains of a mixture of slices (`math` for math.0, math.1, ...)."""


@register("remove", Options, takes="none", on_mixture=True)
def remove(given: Ingredients) -> Mixture:
    """Plan the mixture without the experts that are named; top_k is lowered to what is left."""
    moe, leaving = moe_of(given), given.settings(Options).names
    for name in leaving:
        if not any(name in (label, label.rpartition(".")[0]) for label in moe.experts):
            raise UserError(f"names={name}: no such expert; the mixture has {', '.join(moe.experts)}")
    if not leaving:
        raise UserError("names=[]: none given; name at least one expert, e.g. names=[math]")
    stays = [n for n, label in enumerate(moe.experts) if not {label, label.rpartition(".")[0]} & {*leaving}]
    if not stays:
        raise UserError(f"names={','.join(leaving)}: no expert would be left")
    if ANCHOR in leaving:
        raise UserError(f"names={ANCHOR}: the other experts were trained beside it")
    options, limit = dict(moe.options), len(stays)
    if "groups" in options:
        size = moe.num_experts // options["groups"]
        kept_groups = {n // size for n in stays}
        if len(kept_groups) * size != len(stays):
            raise UserError("names: a slice cannot leave its domain; name whole domains")
        limit = options["groups"] = len(kept_groups)
    shared = shared_of(given)
    if shared:
        for name in leaving:
            shared = shared.without(name)

    def router(target: str) -> Expr:
        whole = Take(given.seed, target)
        if target.endswith((".w1", ".w2")):
            return whole
        offset = 1 if target.endswith("penalty") else 0  # the anchor has none
        rows = [n - offset for n in stays if n >= offset]
        return Concat(tuple(Slice(whole, 0, n, n + 1) for n in rows))

    smaller = dataclasses.replace(
        moe,
        num_experts=len(stays),
        top_k=given.choose_top_k(moe.top_k, limit),
        experts=[moe.experts[n] for n in stays],
        options=options,
    )
    return changed(
        given,
        smaller,
        lambda layer, number, part: Take(given.seed, names.expert(layer, stays[number], part)),
        router,
        shared=shared,
        unused=f"of {', '.join(leaving)}, removed" + (", or averaged again" if shared else ""),
        retrain="nothing; a short training of the router may help",
    )
