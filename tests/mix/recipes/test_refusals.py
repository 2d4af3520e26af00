"""What a recipe cannot do is one line that names the setting, and nothing is written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from btx_testing.commands import CommandServer
from btx_testing.mixing import make_models, mix_arguments

from btx_nemo.errors import UserError
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown recipe": ("moe", {}, "recipe=moe: unknown; known: add, average, bam, bar, btx, "),
    "bam": ("bam", {}, "recipe=bam: not supported because Megatron-Core has one attention block in a layer"),
    "m does not divide": ("divmoe", {"options": {"slices": 5}}, "slices=5 does not divide .* intermediate_size=48"),
    "no slices": ("divmoe", {"options": {"slices": 0}}, "slices=0 must be at least 1"),
    "k above the groups": ("divmoe", {"top_k": 3}, "top_k=3 exceeds the 2 experts"),
    "pack_tied": ("divmoe", {"options": {"slices": 3, "router_init": "pack_tied"}}, "router_init=pack_tied: slices=3"),
    "scale_mode": (
        "divmoe",
        {"options": {"scale_mode": "x"}},
        "scale_mode=x: unknown; known: paper, cuberoot_consistent, exact_down",
    ),
    "nonexpert_init": ("divmoe", {"options": {"nonexpert_init": "x"}}, "known: mean, base, random"),
    "chunks": ("btx", {"options": {"variant": "split", "chunks": 7}}, "chunks=7 does not divide"),
    "blend": ("btx", {"options": {"variant": "blnd"}}, "variant=blnd: unknown; known: plain, split, blend"),
    "granularity": ("nvidia_upcycling", {"options": {"granularity": 5}}, "granularity=5 does not divide"),
    "part of a copy": ("nvidia_upcycling", {"top_k": 3}, "top_k=3 is no multiple of granularity=8"),
    "softmax": ("nvidia_upcycling", {"options": {"softmax": "no"}}, "softmax=no: unknown; known: before, after"),
    "ratio": ("drop_upcycling", {"options": {"ratio": 1.5}}, "ratio=1.5 must be from 0 to 1"),
    "too many copies": ("sparse_upcycling", {"options": {"copies": 10**9}}, "1000000000 experts .* more than 16384"),
    "too many shards": (
        "nvidia_upcycling",
        {"options": {"expansion": 10**9}},
        "experts in a layer are more than",
    ),
    "target of a checkpoint": ("btx", {"format": "megatron", "target": "mixtral"}, "target=mixtral: is .* format=hf"),
    "copies": ("sparse_upcycling", {"options": {"copies": 0}}, "copies=0 must be at least 1"),
    "every": ("sparse_upcycling", {"options": {"every": 3}}, "every=3 must be from 1 to the 2 layers"),
    "specialists": (
        "sparse_upcycling",
        {"experts": True},
        "experts.math: recipe=sparse_upcycling takes no specialists",
    ),
    "density": ("ties", {"options": {"density": 2.0}}, "density=2 must be from 0 to 1"),
    "drop": ("dare", {"options": {"drop": 1.0}}, "drop=1 must be from 0 to less than 1"),
    "top_k of a dense model": ("average", {"top_k": 2}, "top_k=2: recipe=average makes no fresh routing"),
    "unknown option": (
        "ties",
        {"options": {"lambda": 1.0}},
        "unknown key lambda; known: density, scale, scope, zero_s",
    ),
    "type": ("ties", {"options": {"density": "much"}}, "density must be float, not 'much'"),
    "no specialist": ("ties", {"experts": False}, "experts: none given"),
}
ALONE = ("sparse_upcycling", "nvidia_upcycling", "drop_upcycling", "from_scratch")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> MixConfig:
    return dataclasses.replace(make_models(tmp_path_factory.mktemp("refusals"), "math", "code"), top_k=None)


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_line(models: MixConfig, tmp_path: Path, case: str) -> None:
    recipe, changes, message = WRONG[case]
    changes = dict(changes)
    with_experts = changes.pop("experts", recipe not in ALONE)
    config = dataclasses.replace(
        models, recipe=recipe, out=str(tmp_path / "mix"), experts=models.experts if with_experts else {}, **changes
    )
    with pytest.raises(UserError, match=message) as caught:
        run_mix(config)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", [*ALONE, "divmoe", "ties", "dare", "two_expert"])
def test_a_dry_run_of_every_kind_prints_the_plan_and_reads_nothing(
    models: MixConfig, tmp_path: Path, commands: CommandServer, recipe: str
) -> None:
    experts = {} if recipe in ALONE else dict([*models.experts.items()][: 1 if recipe == "two_expert" else 2])
    config = dataclasses.replace(
        models, recipe=recipe, out=str(tmp_path / "mix"), experts=experts, format="hf" if recipe in ("ties", "dare")
        else "megatron",
    )  # fmt: skip
    ended = commands.run(*mix_arguments(config), "--dry-run", before="btx_testing.mixing:forbid_reading")
    assert (ended.code, ended.err) == (0, "")
    assert "peak memory at most" in ended.out and not list(tmp_path.iterdir())
    measured = "measured before anything is written" in ended.out
    assert measured == (recipe in ("drop_upcycling", "ties"))
    shown = {"drop_upcycling": "splice(", "ties": "ties(", "dare": "product(bernoulli(0.1)", "divmoe": "combine(2 * "}
    assert shown.get(recipe, "normal(std=") in ended.out


def test_the_command_says_what_comes_next_and_what_divmoe_begins_with(
    models: MixConfig, tmp_path: Path, commands: CommandServer
) -> None:
    config = dataclasses.replace(models, recipe="divmoe", out=str(tmp_path / "mix"), format="megatron")
    ended = commands.run(*mix_arguments(config))
    assert ended.code == 0 and ended.out.endswith(f"{tmp_path / 'mix'}: next: train the mixture\n")
    assert "complementarity: " in ended.err and "50.0% expected of independent scores" in ended.err
    assert "router_init=pack_tied makes it 100%" in ended.err
