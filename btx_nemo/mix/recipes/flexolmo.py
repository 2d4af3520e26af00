"""FlexOlmo's merge (Shi et al., 2025, arXiv 2507.07024, section 3): two-expert models that share an anchor, into one.

The seed is the anchor (the public model). Every two-expert model must have its blocks and all its shared tensors, bit
by bit; their domain experts and router rows are put side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, ffn, mixture_of, plan_of
from btx_nemo.mix.recipes.two_expert import ANCHOR, check_no_anchor
from btx_nemo.plan.expr import Concat, Expr, Slice, Take

Same = tuple[tuple[Expr, Expr, str], ...]
ANCHOR_MOVED = "the anchor's expert must stay as it is in training"
ROW_MOVED = (
    "the anchor's router row must be the same in all of them; train with it frozen, and make all with one rng_seed"
)


@dataclass(frozen=True)
class Options:
    """The authors' choice."""

    keep_bias: bool = False
    """Keep the experts' router biases, which the authors' merge and Hugging Face's model leave out."""


def same_anchor(given: Ingredients, pairs: Iterable[str], anchor: str, expert: int | None = None) -> Same:
    """Each pair's first expert is the anchor's: a dense source's blocks, or expert number `expert` of a mixture."""
    found = []
    for pair in pairs:
        for layer in range(given.model.num_layers):
            for part in names.PARTS:
                own = names.ffn(layer, part) if expert is None else names.expert(layer, expert, part)
                found.append((Take(pair, names.expert(layer, 0, part)), Take(anchor, own), ANCHOR_MOVED))
    return tuple(found)


def row(source: str, target: str, number: int) -> Expr:
    """[1, H]: one row of a router's weight."""
    return Slice(Take(source, target), 0, number, number + 1)


def merged_router(given: Ingredients) -> tuple[Parts, Same]:
    """The router of the merge: the anchor's row once, then each domain's; and that the anchor's rows are one."""
    first, *others = given.experts

    def router(target: str) -> Expr:
        if target.endswith("penalty"):
            return Concat(tuple(Take(pair, target) for pair in given.experts))
        return Concat((row(first, target, 0), *(row(pair, target, 1) for pair in given.experts)))

    rows = [names.router(layer) for layer in range(given.model.num_layers)]
    same = tuple((row(pair, name, 0), row(first, name, 0), ROW_MOVED) for pair in others for name in rows)

    def expert(layer: int, number: int, part: str) -> Expr:
        if number == 0:
            return ffn(given.seed, layer, part)
        return Take(given.experts[number - 1], names.expert(layer, 1, part))

    return Parts(rest=lambda name: Take(given.seed, name), expert=expert, router=router), same


def merged_moe(given: Ingredients, top_k: int, keep_bias: bool) -> MoEConfig:
    """The anchor and the k domains."""
    check_no_anchor(given)
    if keep_bias and not all((model.moe and model.moe.options.get("bias")) for model in given.models.values()):
        raise UserError("keep_bias=true: not all of the two-expert models have a router bias; leave it out")
    count = 1 + len(given.experts)
    return MoEConfig(
        num_experts=count,
        top_k=given.choose_top_k(top_k, count),
        router="flexolmo",
        options={"bias": True} if keep_bias else {},
        experts=[ANCHOR, *given.experts],
    )


@register("flexolmo", Options, pairs="always")
def flexolmo(given: Ingredients) -> Mixture:
    """Plan the merge; a token goes to five experts by default, as in the released model, or to all that there are."""
    model = mixture_of(given, merged_moe(given, 5, given.settings(Options).keep_bias))
    parts, same_rows = merged_router(given)
    shared = [name for name in given.layouts[given.seed] if not names.parse_ffn(name)]
    moved = "FlexOlmo trains nothing but the domain's expert; for models that trained more, use recipe=bar"
    same_shared = tuple((Take(pair, name), Take(given.seed, name), moved) for pair in given.experts for name in shared)
    unused = dict.fromkeys(given.experts, "the anchor's own (bit-identical), or a router bias (keep_bias=false)")
    return Mixture(
        plan=plan_of(given, model, parts, unused),
        model=model,
        same=(*same_anchor(given, given.experts, given.seed), *same_shared, *same_rows),
        retrain="optional: train the router alone on a little of every domain",
    )
