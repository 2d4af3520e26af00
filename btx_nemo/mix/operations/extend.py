"""extend: a further domain for a Nexus mixture (arXiv 2408.15901, section 3.3) that leaves the old logits as they are.

The router's projection stays; the domain brings its embedding. Shared tensors become (1 - lambda) old + lambda new.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.mix.operations.base import changed, moe_of
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.nexus import embedding_row, embedding_size
from btx_nemo.mix.recipes.parts import check_number
from btx_nemo.plan.expr import Combine, Concat, Expr, Take


@dataclass(frozen=True)
class Options:
    """The paper's choice."""

    embeddings: str
    """Folder that `btx-nemo embed` wrote with the mixture's own embedder, with a row for the new domain."""
    new_weight: float | None = None
    """lambda; None for 1 / (n + 1), with which untrained shared tensors become the plain mean."""


@register("extend", Options, takes="one", on_mixture=True, routed=False)
def extend(given: Ingredients) -> Mixture:
    """Plan the mixture with one more expert."""
    options, moe, (domain,) = given.settings(Options), moe_of(given), given.experts
    count = moe.num_experts
    if moe.router != "nexus":
        raise UserError(f"recipe=extend: is Nexus's, and moe.router={moe.router}; use recipe=add")
    if domain in moe.experts:
        raise UserError(f"experts.{domain}: the mixture has an expert of that name")
    size, wanted = embedding_size(given), moe.options.get("embedding_size")
    if size != wanted:
        raise UserError(f"embeddings={options.embeddings}: rows of {size}, but the mixture's are of {wanted}")
    weight = 1 / (count + 1) if options.new_weight is None else options.new_weight
    check_number("new_weight", weight, 0, 1)

    def rest(name: str) -> Expr:
        return Combine((Take(given.seed, name), Take(domain, name)), (1 - weight, weight))

    def router(target: str) -> Expr:
        whole = Take(given.seed, target)
        return Concat((whole, embedding_row(given, domain))) if target.endswith("domain_embeddings") else whole

    def expert(layer: int, number: int, part: str) -> Expr:
        if number < count:
            return Take(given.seed, names.expert(layer, number, part))
        return Take(domain, names.ffn(layer, part))

    larger = dataclasses.replace(moe, num_experts=count + 1, experts=[*moe.experts, domain])
    return changed(
        given,
        larger,
        expert,
        router,
        rest=rest,
        unused="replaced",
        retrain="train on at most 1B tokens, half of the new domain and half of the old ones",
    )
