"""DivMoE: every specialist's feed-forward block cut into m shards, one domain group of experts each (section 3).

Expert i m + j is in slot j of specialist i's group. The router, `divmoe`, takes at most one expert of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from btx_nemo.config.choice import check_choice
from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register
from btx_nemo.mix.recipes.nvidia_upcycling import activation_scale, part_scale
from btx_nemo.mix.recipes.parts import (
    Parts,
    chunk,
    ffn,
    fresh_rows,
    mean,
    mixture_of,
    plan_of,
    repeated_rows,
    scaled,
    width_of,
)
from btx_nemo.plan.expr import Expr, Normal, Take, generator_for
from btx_nemo.routers.functional import grouped_top_k_gates

PROBES = 4096


@dataclass(frozen=True)
class Options:
    """The paper's choices (n specialists, m = 2, k = 2), but for the scale, which is exact."""

    slices: int = 2
    """m: shards of a specialist's block."""
    scale_mode: str = "exact_down"
    """exact_down: down times m. cuberoot_consistent: all three times m^(1/3). paper: times (n m^2 / k)^(1/3), eq. 5.

    The gates sum to one, for which the paper's factor is too large: its output is about n m / k times the dense one.
    """
    router_init: str = "random"
    """random, or pack_tied: tied rows and shifted shards, with which equal specialists give the dense model exactly."""
    nonexpert_init: str = "mean"
    """What is no expert: mean over the specialists and the base, base, or random: of one specialist, by layer."""


@register("divmoe", Options)
def divmoe(given: Ingredients) -> Mixture:
    """Plan a mixture of n m experts in n groups."""
    options, members = given.settings(Options), given.experts
    check_choice("scale_mode", options.scale_mode, ("paper", "cuberoot_consistent", "exact_down"))
    check_choice("router_init", options.router_init, ("random", "pack_tied"))
    check_choice("nonexpert_init", options.nonexpert_init, ("mean", "base", "random"))
    groups, slots = len(members), options.slices
    width = width_of(given, slots, "slices")
    top_k = given.choose_top_k(2, groups)
    tied = options.router_init == "pack_tied"
    if tied and (groups % slots or top_k % slots):
        raise UserError(
            f"router_init=pack_tied: slices={slots} must divide the {groups} specialists and top_k={top_k}; "
            "choose other numbers, or router_init=random"
        )
    scale = activation_scale(groups, slots, top_k, "before" if options.scale_mode == "paper" else "after")
    mode = "exact_down" if options.scale_mode == "exact_down" else "cuberoot"

    def shard_in(number: int) -> int:
        group, slot = divmod(number, slots)
        return (slot + group) % slots if tied else slot

    def expert(layer: int, number: int, part: str) -> Expr:
        shard = chunk(ffn(members[number // slots], layer, part), part, shard_in(number), width)
        return scaled(shard, part_scale(mode, scale, part))

    def router(target: str) -> Expr:
        if not tied:
            return Normal(given.std())
        rows = fresh_rows(given, target, groups // slots, given.std())
        return repeated_rows(rows, [number // (slots * slots) for number in range(groups * slots)])

    labels = [f"{members[number // slots]}.{shard_in(number)}" for number in range(groups * slots)]
    moe = MoEConfig(
        num_experts=len(labels), top_k=top_k, router="divmoe", options={"groups": groups}, experts=labels
    )  # fmt: skip
    model = mixture_of(given, moe, width)
    parts = Parts(rest=_rest(given, options.nonexpert_init), expert=expert, router=router)
    reasons = dict.fromkeys(members, f"nonexpert_init={options.nonexpert_init}")
    unused = {given.seed: "the base is no expert", **(reasons if options.nonexpert_init != "mean" else {})}
    return Mixture(
        plan=plan_of(given, model, parts, unused),
        model=model,
        retrain="train the mixture",
        probe=lambda read: complementarity_lines(model, shard_in, read),
    )


def _rest(given: Ingredients, init: str) -> Callable[[str], Expr]:
    if init == "mean":
        return mean((given.seed, *given.experts))

    def rest(name: str) -> Expr:
        layer = names.layer_of(name)
        if init == "base":
            return Take(given.seed, name)
        place = "outside of the layers" if layer is None else f"layer {layer}"
        draw = torch.randint(len(given.experts), (), generator=generator_for(given.rng_seed, f"non-expert/{place}"))
        return Take(given.experts[int(draw)], name)

    return rest


def complementarity(weight_EH: torch.Tensor, groups: int, top_k: int, shards_E: list[int], seed: int = 0) -> float:
    """Share of random normalised hidden states whose k experts hold every shard equally often."""
    count, hidden = weight_EH.shape
    slots = count // groups
    x_TH = torch.randn(PROBES, hidden, generator=generator_for(seed, "complementarity"))
    x_TH = x_TH / x_TH.square().mean(dim=-1, keepdim=True).sqrt()
    _, selected_TE = grouped_top_k_gates(x_TH @ weight_EH.float().T, groups, top_k)
    carried_ES = torch.nn.functional.one_hot(torch.tensor(shards_E), slots).float()
    counts_TS = selected_TE.float() @ carried_ES
    return float((counts_TS * slots == top_k).all(dim=-1).float().mean())


def complementarity_lines(
    model: ModelConfig, shard_in: Callable[[int], int], read: Callable[[str], torch.Tensor]
) -> list[str]:
    """How often the fresh routers' choice covers a whole feed-forward block, and what that means."""
    moe = model.moe
    assert moe is not None
    groups = moe.options["groups"]
    slots, shards = moe.num_experts // groups, [shard_in(number) for number in range(moe.num_experts)]
    if slots == 1:
        return []
    shares = [
        complementarity(read(names.router(layer)), groups, moe.top_k, shards) for layer in range(model.num_layers)
    ]
    mean_share = sum(shares) / len(shares)
    line = f"complementarity: {mean_share:.1%} of tokens get every shard equally often ({min(shares):.1%} in the least"
    line += " layer; measured on the fresh routers with random normalised hidden states"
    if moe.top_k == slots:
        line += f"; {math.factorial(slots) / slots**slots:.1%} expected of independent scores"
    if mean_share == 1:
        return [f"{line}): the mixture begins with whole feed-forward blocks"]
    return [
        f"{line}): the other tokens begin with some shards twice and others not at all, so that the mixture does not "
        "compute the dense model even where the specialists are equal; router_init=pack_tied makes it 100%"
    ]
