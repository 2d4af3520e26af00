"""Branch-Train-MiX (Sukhbaatar et al., 2024, arXiv 2403.07816, section 3.2), and its variants of section 3.3.

Every specialist's feed-forward blocks become experts, the seed's too (the generalist); all other tensors are the
uniform mean over the same models; routers are fresh.
"""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.config.choice import check_choice
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, axis, chunk, ffn, mean, mixture_of, plan_of, width_of
from btx_nemo.plan.expr import Concat, Expr, Normal


@dataclass(frozen=True)
class Options:
    """The paper's choices."""

    include_seed: bool = True
    """Whether the seed is an expert too, the generalist, after the specialists; and counts in the mean."""
    variant: str = "plain"
    """plain: a block is an expert. split: each becomes `chunks` narrower ones. blend: an expert has a chunk of all."""
    chunks: int = 2
    """C of `split`; a token's top_k is 2 C by default, so that as much is active. Chunks are not rescaled."""


@register("btx", Options)
def btx(given: Ingredients) -> Mixture:
    """Plan a mixture whose experts are the specialists in order, then the seed when `include_seed`."""
    options = given.settings(Options)
    check_choice("variant", options.variant, ("plain", "split", "blend"))
    members = (*given.experts, given.seed) if options.include_seed else given.experts
    labels = [*given.experts, "generalist"] if options.include_seed else list(given.experts)
    pieces = {"plain": 1, "split": options.chunks, "blend": len(members)}[options.variant]
    width = width_of(given, pieces, "chunks" if options.variant == "split" else "experts of variant=blend")
    if options.variant == "split":
        labels = [f"{label}.{number}" for label in labels for number in range(pieces)]
    elif options.variant == "blend":
        labels = [f"blend.{number}" for number in range(pieces)]

    def expert(layer: int, number: int, part: str) -> Expr:
        if options.variant == "plain":
            return ffn(members[number], layer, part)
        if options.variant == "split":
            return chunk(ffn(members[number // pieces], layer, part), part, number % pieces, width)
        chunks = tuple(chunk(ffn(member, layer, part), part, number, width) for member in members)
        return Concat(chunks, axis(part))

    split = options.variant == "split"
    top_k = given.choose_top_k(2 * pieces if split else 2, len(labels))
    moe = MoEConfig(num_experts=len(labels), top_k=top_k, experts=labels)
    model = mixture_of(given, moe, width if split else None)
    parts = Parts(rest=mean(members), expert=expert, router=lambda _: Normal(given.std()))
    unused = {} if options.include_seed else {given.seed: "the seed is not an expert (include_seed=false)"}
    return Mixture(plan=plan_of(given, model, parts, unused), model=model, retrain="train the mixture")
