"""The two-expert model that FlexOlmo (arXiv 2507.07024, section 3) and BAR train: an anchor, and one domain's expert.

The anchor's feed-forward blocks and everything shared are the seed's (BAR: the post-trained model); the domain's blocks
are the specialist's (FlexOlmo: the seed again; BAR: the pre-trained base). Train it with the anchor and its row frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.extras import EMBEDDINGS
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.nexus import embedding_row, embedding_size
from btx_nemo.mix.recipes.parts import Parts, ffn, fresh_rows, mixture_of, plan_of
from btx_nemo.plan.expr import Concat, Expr, Full, Take

ANCHOR = "anchor"
"""The anchor's name among the experts, and among the domains of its embedding."""


@dataclass(frozen=True)
class Options:
    """FlexOlmo's choices."""

    embeddings: str | None = None
    """Folder of `btx-nemo embed` with `anchor` and the domain, as large as the model's width; None: rows are drawn.

    Drawn rows depend on rng_seed and the names alone, so that all domains get the same anchor row.
    """
    bias: bool = True
    """A trainable bias <= 0 on the domain's logit, from 0; it is dropped at the merge."""


def check_no_anchor(given: Ingredients) -> None:
    """Raise UserError for a domain that has the anchor's name."""
    if ANCHOR in given.experts:
        raise UserError(f"experts.{ANCHOR}: is the name of the seed's own expert; rename the domain")


@register("two_expert", Options, takes="one", trained=False)
def two_expert(given: Ingredients) -> Mixture:
    """Plan the mixture of two."""
    options, (domain,) = given.settings(Options), given.experts
    check_no_anchor(given)
    if options.embeddings and embedding_size(given) != given.model.hidden_size:
        raise UserError(
            f"embeddings={options.embeddings}: rows of {embedding_size(given)}, but a router's row has hidden_size="
            f"{given.model.hidden_size}; use an embedder of that size"
        )

    def router(target: str) -> Expr:
        if target.endswith("penalty"):
            return Full(0.0)
        if EMBEDDINGS in given.extras:
            return Concat((embedding_row(given, ANCHOR), embedding_row(given, domain)))
        rows = (fresh_rows(given, target, 1, given.std(), f"/{name}") for name in (ANCHOR, domain))
        return Concat(tuple(rows))

    moe = MoEConfig(
        num_experts=2,
        top_k=given.choose_top_k(2, 2),
        router="flexolmo",
        options={"bias": True} if options.bias else {},
        experts=[ANCHOR, domain],
    )
    model = mixture_of(given, moe)
    parts = Parts(
        rest=lambda name: Take(given.seed, name),
        expert=lambda layer, number, part: ffn((given.seed, domain)[number], layer, part),
        router=router,
    )
    unused = {domain: "only its feed-forward blocks are taken"}
    retrain = (
        "train it on the domain with the anchor's expert and router row frozen, then merge it (recipe=flexolmo or bar)"
    )
    return Mixture(plan=plan_of(given, model, parts, unused), model=model, retrain=retrain)
