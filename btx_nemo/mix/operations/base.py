"""What the operations have in common: the mixture as it is, but for what they change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.extras import ASIDE, ASIDE_FOLDER
from btx_nemo.mix.recipes.bar import Shared, from_aside, shared_names
from btx_nemo.mix.recipes.base import Ingredients, Mixture
from btx_nemo.mix.recipes.flexolmo import Same, same_anchor
from btx_nemo.mix.recipes.parts import Parts, plan_of
from btx_nemo.mix.recipes.two_expert import ANCHOR
from btx_nemo.plan.expr import Expr, Take, infer


@dataclass(frozen=True)
class Options:
    """Where a BAR mixture keeps its experts' shared tensors."""

    aside: str | None = None
    """Folder `shared_per_expert` of the mixture (by default that of `in`, or of what the run `in` began as); its
    averages are then made again."""


def moe_of(given: Ingredients) -> MoEConfig:
    """The mixture's routing, with a name for every expert."""
    moe = given.model.moe
    assert moe is not None
    labels = moe.experts or [f"expert.{number}" for number in range(moe.num_experts)]
    return dataclasses.replace(moe, experts=labels)


def number_of(moe: MoEConfig, label: str) -> int:
    """An expert's number by its name. Raises UserError with the known names."""
    if label not in moe.experts:
        raise UserError(f"no expert {label!r} in the mixture; it has {', '.join(moe.experts)}")
    return moe.experts.index(label)


def check_whole_blocks(moe: MoEConfig, operation: str) -> None:
    """Raise UserError where an expert is not one model's whole feed-forward block, routed by a row of its own."""
    if moe.router in ("divmoe", "nexus"):
        remedy = "use recipe=extend" if moe.router == "nexus" and operation == "add" else "mix again"
        raise UserError(f"recipe={operation}: not possible with moe.router={moe.router}; {remedy}")
    if moe.options.get("bias"):
        raise UserError(f"recipe={operation}: not possible with a router bias; merge with keep_bias=false")


def domain_block(given: Ingredients, name: str, layer: int, part: str) -> Expr:
    """A matrix of a specialist's block: a dense model's, or that of a two-expert model's domain."""
    return Take(name, names.ffn(layer, part) if given.models[name].moe is None else names.expert(layer, 1, part))


def shared_of(given: Ingredients) -> Shared | None:
    """The mixture's shared tensors expert by expert; None where they are not averages that can be made again."""
    if ASIDE not in given.extras:
        return None
    _check_aside(given)
    return from_aside(given.extras[ASIDE], shared_names(given), given.seed)


def _check_aside(given: Ingredients) -> None:
    """Raise UserError where what is kept aside is another mixture's."""
    extra, moe, layout = given.extras[ASIDE], moe_of(given), given.layouts[given.seed]
    kept, domains = extra.facts["experts"], [label for label in moe.experts if label != ANCHOR]
    remedy = "give the folder that was written with the mixture"
    if moe.router != "flexolmo" or kept != domains:
        raise UserError(
            f"{extra.folder}: keeps the shared tensors of {', '.join(kept)}, but the mixture has "
            f"{', '.join(domains)}, router={moe.router}; {remedy}"
        )
    for key, info in extra.reader.layout().items():
        expert, _, name = key.partition(":")
        if expert not in (ANCHOR, *kept) or name not in layout or layout[name].shape != info.shape:
            raise UserError(f"{extra.folder}: tensor {key!r} {list(info.shape)} is none of the mixture's; {remedy}")


def same_averages(given: Ingredients) -> Same:
    """The mixture's shared tensors are the averages of what is kept aside, where no dtype was asked for in between."""
    shared, layout = shared_of(given), given.layouts[given.seed]
    if shared is None:
        return ()
    changed = "it was kept by another mixture, or these have been trained since; making them again would lose that"
    return tuple(
        (Take(given.seed, name), shared.merged(name), changed)
        for name in shared.anchor
        if infer(shared.merged(name), given.layouts).dtype == layout[name].dtype
    )


def pairs_of(given: Ingredients) -> tuple[str, ...]:
    """The specialists that are two-expert models."""
    return tuple(name for name in given.experts if given.models[name].moe is not None)


def shared_with_pairs(given: Ingredients, operation: str) -> Shared | None:
    """As `shared_of`, with the shared tensors of the two-expert models that are added or take others' places.

    Raises UserError for a dense specialist, which has none that were trained beside the anchor.
    """
    shared = shared_of(given)
    if shared is None:
        return None
    if len(pairs_of(given)) < len(given.experts):
        raise UserError(f"recipe={operation}: a BAR mixture takes two-expert models, whose shared tensors are averaged")
    for pair in pairs_of(given):
        shared = shared.with_pair(given, pair)
    return shared


def same_anchors(given: Ingredients, moe: MoEConfig, shared: Shared | None) -> Same:
    """Two-expert models must have the mixture's anchor, and its shared tensors where these are no averages."""
    pairs = pairs_of(given)
    if not pairs:
        return ()
    moved = f"for a BAR mixture give aside=DIR, its {ASIDE_FOLDER} folder"
    rest = [] if shared else shared_names(given)
    return (
        *same_anchor(given, pairs, given.seed, number_of(moe, ANCHOR)),
        *((Take(pair, name), Take(given.seed, name), moved) for pair in pairs for name in rest),
    )


def changed(
    given: Ingredients,
    moe: MoEConfig,
    expert: Callable[[int, int, str], Expr],
    router: Callable[[str], Expr],
    *,
    rest: Callable[[str], Expr] | None = None,
    shared: Shared | None = None,
    same: Same = (),
    unused: str,
    retrain: str,
) -> Mixture:
    """The mixture with other experts and routers; its averages are made again where there is a `shared`."""
    model = dataclasses.replace(given.model, moe=moe)
    parts = Parts(
        rest=rest or (shared.merged if shared else lambda name: Take(given.seed, name)),
        expert=expert,
        router=router,
        shared_expert=lambda layer, part: Take(given.seed, names.shared_expert(layer, part)),
    )
    reasons = {given.seed: unused}
    reasons |= dict.fromkeys(given.experts, "only the domain's expert is taken; the rest is the mixture's")
    reasons |= dict.fromkeys([ASIDE] if shared else [], "of an expert that is replaced or removed")
    return Mixture(
        plan=plan_of(given, model, parts, reasons),
        model=model,
        same=(*same, *same_averages(given)),
        aside=shared.aside() if shared else {},
        aside_facts=shared.facts() if shared else {},
        retrain=retrain,
    )
