"""Nexus (Gritsch et al., 2024, arXiv 2408.15901, section 3): experts routed by embeddings of their domains.

The seed's feed-forward block is the shared expert, which every token passes; all else is the mean over the specialists
without the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.extras import EMBEDDINGS, EMBEDDINGS_TENSOR
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, ffn, mean, mixture_of, plan_of
from btx_nemo.plan.expr import Concat, Expr, Normal, Slice, Take


@dataclass(frozen=True)
class Options:
    """Where the domains' embeddings are."""

    embeddings: str
    """Folder that `btx-nemo embed` wrote, with a row for each of the experts' domains."""


def embedding_row(given: Ingredients, domain: str) -> Expr:
    """[1, D]: a domain's embedding. Raises UserError when the folder has none."""
    extra = given.extras[EMBEDDINGS]
    domains = extra.facts["domains"]
    if domain not in domains:
        raise UserError(f"{extra.folder}: no embedding of {domain!r}; it has {', '.join(domains)}")
    row = domains.index(domain)
    return Slice(Take(EMBEDDINGS, EMBEDDINGS_TENSOR), 0, row, row + 1)


def embedding_size(given: Ingredients) -> int:
    """D."""
    return given.layouts[EMBEDDINGS][EMBEDDINGS_TENSOR].shape[1]


@register("nexus", Options)
def nexus(given: Ingredients) -> Mixture:
    """Plan a mixture of the specialists beside the seed's feed-forward blocks."""
    if given.top_k not in (None, 1):
        raise UserError(f"top_k={given.top_k}: Nexus sends a token to one expert; leave top_k out")
    size, width = embedding_size(given), given.model.ffn_hidden_size
    moe = MoEConfig(
        num_experts=len(given.experts),
        top_k=1,
        router="nexus",
        options={"embedding_size": size},
        shared_expert_intermediate_size=width,
        experts=list(given.experts),
    )

    def router(target: str) -> Expr:
        if target.endswith("domain_embeddings"):
            return Concat(tuple(embedding_row(given, domain) for domain in given.experts))
        return Normal(size**-0.5 if target.endswith("w1") else given.std(given.model.init_std))

    parts = Parts(
        rest=mean(given.experts),
        expert=lambda layer, number, part: ffn(given.experts[number], layer, part),
        router=router,
        shared_expert=lambda layer, part: ffn(given.seed, layer, part),
    )
    model = mixture_of(given, moe)
    unused = {given.seed: "Nexus averages over the experts alone"}
    return Mixture(plan=plan_of(given, model, parts, unused), model=model, retrain="train the mixture")
