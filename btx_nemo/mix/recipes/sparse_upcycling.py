"""Sparse Upcycling (Komatsuzaki et al., 2022, arXiv 2212.05055): one dense model, copied; routers are fresh.

With gates that sum to one the mixture computes what the dense model does, whatever its routers.
"""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families.config import MoEConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.parts import Parts, ffn, mixture_of, plan_of
from btx_nemo.plan.expr import Normal, Take


@dataclass(frozen=True)
class Options:
    """The paper's choices; Branch-Train-MiX's baseline is copies=4 every=1."""

    copies: int = 32
    """Experts of a layer."""
    every: int = 2
    """Every how many layers one has experts: 2 for the second, the fourth, ...; 1 for all."""


@register("sparse_upcycling", Options, takes="none")
def sparse_upcycling(given: Ingredients) -> Mixture:
    """Plan a mixture of identical experts in some of the layers."""
    options, depth = given.settings(Options), given.model.num_layers
    if not 1 <= options.every <= depth:
        raise UserError(f"every={options.every} must be from 1 to the {depth} layers")
    if options.copies < 1:
        raise UserError(f"copies={options.copies} must be at least 1")
    layers = [layer for layer in range(depth) if layer % options.every == options.every - 1]
    moe = MoEConfig(
        num_experts=options.copies,
        top_k=given.choose_top_k(2, options.copies),
        experts=[f"copy.{number}" for number in range(options.copies)],
        layers=layers if options.every > 1 else None,
    )
    model = mixture_of(given, moe)
    parts = Parts(
        rest=lambda name: Take(given.seed, name),
        expert=lambda layer, _, part: ffn(given.seed, layer, part),
        router=lambda _: Normal(given.std()),
    )
    return Mixture(plan=plan_of(given, model, parts, {}), model=model, retrain="train the mixture")
