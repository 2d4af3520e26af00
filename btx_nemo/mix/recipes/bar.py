"""BAR's merge (section 3.3): like FlexOlmo's, but shared tensors may have been trained, and are averaged.

The average is over the k domain experts, the anchor excluded, those that never trained a tensor included. What each
expert made of a shared tensor is kept aside, so that it can be upgraded or removed exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from btx_nemo.families import names
from btx_nemo.mix.extras import ASIDE, Extra
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.flexolmo import merged_moe, merged_router, same_anchor
from btx_nemo.mix.recipes.parts import mixture_of, plan_of
from btx_nemo.mix.recipes.two_expert import ANCHOR
from btx_nemo.plan.expr import Expr, Mean, Take

RETRAIN = "train the router alone, on about 5% of every domain's data, with the top_k of later use"


@dataclass(frozen=True)
class Options:
    """The paper's choices."""

    only_diverged: bool = False
    """Average a tensor over the experts that trained it alone, instead of over all."""
    keep_bias: bool = False
    """Keep the experts' router biases."""


@dataclass(frozen=True)
class Shared:
    """The shared tensors of a merge, expert by expert: what each made of those that any of them trained."""

    own: Mapping[str, Mapping[str, Expr]]
    """Expert -> tensor -> its value, for the tensors in which the expert differs from the anchor."""
    anchor: Mapping[str, Expr]
    """Tensor -> the anchor's value, for all tensors."""
    only_diverged: bool

    def merged(self, name: str) -> Expr:
        """The average, or the anchor's where no expert differs from it."""
        trained = [own[name] for own in self.own.values() if name in own]
        if not trained:
            return self.anchor[name]
        if self.only_diverged:
            return Mean(tuple(trained))
        return Mean(tuple(own.get(name, self.anchor[name]) for own in self.own.values()))

    def aside(self) -> dict[str, Expr]:
        """EXPERT:TENSOR -> what must be kept, so that any expert can be taken out again."""
        kept = {f"{expert}:{name}": expr for expert, own in self.own.items() for name, expr in own.items()}
        trained = dict.fromkeys(name for own in self.own.values() for name in own)
        return kept | {f"{ANCHOR}:{name}": self.anchor[name] for name in trained}

    def facts(self) -> dict[str, Any]:
        """What `from_aside` needs beside the tensors."""
        return {"experts": list(self.own), "only_diverged": self.only_diverged}

    def without(self, expert: str) -> Shared:
        """The same without an expert."""
        return dataclasses.replace(self, own={name: own for name, own in self.own.items() if name != expert})

    def with_pair(self, given: Ingredients, expert: str) -> Shared:
        """The same with what a two-expert model made of the shared tensors, in the place that its name has, or last."""
        own = {
            name: Take(expert, name)
            for name, value in self.anchor.items()
            if not given.equal(Take(expert, name), value)
        }
        return dataclasses.replace(self, own={**self.own, expert: own})


def from_aside(extra: Extra, shared: list[str], mixture: str) -> Shared:
    """The shared tensors of a mixture with what it keeps aside."""
    own: dict[str, dict[str, Expr]] = {expert: {} for expert in extra.facts["experts"]}
    anchor: dict[str, Expr] = {name: Take(mixture, name) for name in shared}
    for key in extra.reader.layout():
        expert, _, name = key.partition(":")
        (anchor if expert == ANCHOR else own[expert])[name] = Take(ASIDE, key)
    return Shared(own, anchor, bool(extra.facts.get("only_diverged")))


def shared_names(given: Ingredients) -> list[str]:
    """What of the seed is neither an expert nor a router."""
    return [
        name
        for name in given.layouts[given.seed]
        if not (names.parse_ffn(name) or names.parse_expert(name) or names.parse_router(name))
    ]


@register("bar", Options, pairs="always")
def bar(given: Ingredients) -> Mixture:
    """Plan the merge; a token goes to four experts by default, as in the paper, or to all that there are."""
    options = given.settings(Options)
    model = mixture_of(given, merged_moe(given, 4, options.keep_bias))
    anchor: dict[str, Expr] = {name: Take(given.seed, name) for name in shared_names(given)}
    shared = Shared({}, anchor, options.only_diverged)
    for pair in given.experts:
        shared = shared.with_pair(given, pair)
    parts, same_rows = merged_router(given)
    unused = dict.fromkeys(given.experts, "the anchor's own (bit-identical), or a router bias (keep_bias=false)")
    unused[given.seed] = "trained by the experts, whose average is taken (the anchor is excluded)"
    return Mixture(
        plan=plan_of(given, model, dataclasses.replace(parts, rest=shared.merged), unused),
        model=model,
        same=(*same_anchor(given, given.experts, given.seed), *same_rows),
        aside=shared.aside(),
        aside_facts=shared.facts(),
        retrain=RETRAIN,
    )
