"""Dense merges: one dense model in the seed's architecture, against naive float64 loops over the files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from btx_testing.mixing import make_models
from btx_testing.models import hf_logits, probe_tokens
from btx_testing.shared import SMALLEST, apply_recipe, random_tensors
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

RECIPES = ("average", "task_arithmetic", "ties", "dare")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> MixConfig:
    return dataclasses.replace(make_models(tmp_path_factory.mktemp("merge"), "math", "code", "prose"), top_k=None)


def merged(models: MixConfig, out: Path, recipe: str, **changes: object) -> dict[str, torch.Tensor]:
    run_mix(dataclasses.replace(models, recipe=recipe, out=str(out), **changes))  # type: ignore[arg-type]
    return load_folder(out)


def flat(tensors: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    return torch.cat([tensors[name].double().flatten() for name in names])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_merge_of_copies_is_the_seed_to_the_bit_and_loads_in_transformers(
    models: MixConfig, tmp_path: Path, recipe: str
) -> None:
    copies = dataclasses.replace(models, experts=dict.fromkeys("abcd", models.seed))  # a sum of three may round
    result = merged(copies, tmp_path / "merged", recipe)
    assert same_bits(result, load_folder(Path(models.seed)))
    tokens = probe_tokens(96)
    assert torch.equal(hf_logits(tmp_path / "merged", tokens), hf_logits(Path(models.seed), tokens))


@pytest.mark.parametrize("recipe", RECIPES)
def test_workers_do_not_change_a_bit(models: MixConfig, tmp_path: Path, recipe: str) -> None:
    one = merged(models, tmp_path / "one", recipe, workers=1)
    assert same_bits(one, merged(models, tmp_path / "many", recipe, workers=7, shard_size=30_000))


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ties_against_a_naive_loop(models: MixConfig, tmp_path: Path, scope: str) -> None:
    result = merged(models, tmp_path / "ties", "ties", options={"density": 0.3, "scale": 0.8, "scope": scope})
    sources = [load_folder(Path(path)) for path in (models.seed, *models.experts.values())]
    order = sorted(result)
    for group in [order] if scope == "model" else [[name] for name in order]:
        base, *tuned = (flat(source, group) for source in sources)
        kept = []
        for model in tuned:
            change = model.float().sub(base.float()).double()
            border = change.abs().sort(descending=True).values[int(0.3 * len(change)) - 1]
            kept.append(torch.where(change.abs() >= border, change, 0.0))
        stacked = torch.stack(kept)
        agree = stacked.where(stacked.sign() == stacked.sum(0).sign(), torch.zeros(()).double())
        expected = base + 0.8 * agree.sum(0) / (agree != 0).sum(0).clamp(min=1)
        torch.testing.assert_close(flat(result, group), expected, atol=2e-6, rtol=1e-5)
    share = torch.stack(kept).ne(0).double().mean()
    assert 0.25 < share < 0.35 or scope == "tensor"


def test_dare_drops_the_share_that_was_asked_for_and_rescales_the_rest() -> None:
    model = dataclasses.replace(SMALLEST, vocab_size=20_000)
    sources = {name: random_tensors(model, n) for n, name in enumerate(("seed", "math"))}
    result = apply_recipe("dare", sources, model, drop=0.75, scale=0.5)
    name = "model.embed_tokens.weight"
    change = (sources["math"][name] - sources["seed"][name]).double()
    moved = (result[name] - sources["seed"][name]).double()
    kept = moved != 0
    assert float(kept.double().mean()) == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(moved[kept], 0.5 / 0.25 * change[kept], atol=1e-5, rtol=1e-5)
    other = apply_recipe("dare", sources, model, rng_seed=1, drop=0.75)
    assert not torch.equal(kept, other[name] != sources["seed"][name])


def test_specialists_are_masked_apart() -> None:
    """Two copies of one specialist with a chance of one half: each change is there 0, 1 or 2 times."""
    model = dataclasses.replace(SMALLEST, vocab_size=20_000)
    seed, math = (random_tensors(model, n) for n in (0, 1))
    result = apply_recipe("dare", {"seed": seed, "a": math, "b": math}, model, drop=0.5)
    name = "model.embed_tokens.weight"
    times = ((result[name] - seed[name]).double() / (math[name] - seed[name]).double() / 2).round()
    shares = [float((times == n).double().mean()) for n in (0, 1, 2)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


def test_ties_keeps_nothing_at_density_zero_and_everything_at_one() -> None:
    sources = {name: random_tensors(SMALLEST, n) for n, name in enumerate(("seed", "math"))}
    nothing = apply_recipe("ties", sources, density=0.0)
    assert all(torch.equal(nothing[name], tensor) for name, tensor in sources["seed"].items())
    everything = apply_recipe("ties", sources, density=1.0)
    for name, tensor in sources["math"].items():
        torch.testing.assert_close(everything[name], tensor, atol=1e-6, rtol=1e-6)


def test_bf16_changes_are_ranked_and_added_in_fp32() -> None:
    """A change of half a bf16 step of the weight would vanish in bf16 arithmetic; three of them do not."""
    base = {name: torch.ones_like(tensor).bfloat16() for name, tensor in random_tensors(SMALLEST, 0).items()}
    step = {name: tensor + 2**-7 for name, tensor in base.items()}
    result = apply_recipe("task_arithmetic", {"seed": base, "a": step, "b": step, "c": step}, scale=1 / 3)
    assert all(torch.equal(result[name], step[name]) for name in base)
