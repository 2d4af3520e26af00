"""Frozen is frozen, in every layout, and a pattern means the same in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import router_jobs, train_jobs
from btx_testing.jobs import random_batch
from btx_testing.pool import RankPool
from btx_testing.runs import VOCAB, TinyWorld

LAYOUTS = [
    pytest.param({}, 1, id="one"),
    pytest.param({"pp": 2}, 2, id="pp2"),
    pytest.param({"ep": 2}, 2, id="ep2"),
    pytest.param({"tp": 2, "ep": 2}, 2, id="tp2-ep2"),
]


def changes(ranks: RankPool, model: Path, layout: dict[str, int], count: int, **options: Any) -> dict[str, bool]:
    """Global parameter name -> whether any part of it changed in three steps."""
    changed: dict[str, bool] = {}
    for result in ranks.run(train_jobs.changed_parameters, str(model), layout, options, ranks=count):
        for name, value in result.items():
            changed[name] = changed.get(name, False) or value
    return changed


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
def test_frozen_experts_keep_their_bits_while_the_rest_learns(
    ranks: RankPool, world: TinyWorld, layout: dict[str, int], count: int
) -> None:
    changed = changes(ranks, world.mixture, layout, count, freeze=["*.mlp.experts.*"], weight_decay=0.5)
    experts = {name: value for name, value in changed.items() if ".mlp.experts." in name}
    assert len(experts) == 2 * 4 * 2  # layers, experts, fc1 and fc2: under global names in every layout
    assert not any(experts.values())
    assert all(value for name, value in changed.items() if name not in experts)
    assert {f"decoder.layers.{i}.mlp.router.weight" for i in (0, 1)} < set(changed)


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
def test_what_a_run_trains_is_all_that_learns(
    ranks: RankPool, world: TinyWorld, layout: dict[str, int], count: int
) -> None:
    """Weight decay is on for all but the routers, which only a gradient moves."""
    changed = changes(ranks, world.mixture, layout, count, train=["*.mlp.router.*"], weight_decay=0.5)
    assert {name for name, value in changed.items() if value} == {
        f"decoder.layers.{i}.mlp.router.weight" for i in (0, 1)
    }


@pytest.mark.parametrize(
    ("model", "pattern", "layout", "count"),
    [
        ("mixture", "*.mlp.router.*", {}, 1),
        ("mixture", "*.mlp.router.*", {"pp": 2}, 2),
        ("mixture", "*.mlp.experts.local_experts.0.*", {"ep": 2}, 2),
        ("dense", "*.1.mlp.*", {}, 1),
        ("dense", "output_layer.*", {"pp": 2}, 2),
    ],
)
def test_recomputation_loses_no_gradient_where_all_below_is_frozen(
    ranks: RankPool, world: TinyWorld, model: str, pattern: str, layout: dict[str, int], count: int
) -> None:
    def losses(**more: Any) -> list[float]:
        options = {"train": [pattern], "lr": 0.01, **more}
        found = ranks.run(train_jobs.losses, str(getattr(world, model)), layout, options, 4, ranks=count)
        assert all(of_rank == found[0] for of_rank in found)
        return found[0]

    kept = losses()
    assert kept[0] - kept[-1] > 1e-3
    part = {"mixture": "moe", "dense": "mlp"}[model]
    for again in ({"recompute": "full"}, {"recompute": "selective", "recompute_modules": [part]}):
        assert losses(**again) == pytest.approx(kept, abs=1e-6), again


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
def test_experts_of_some_ranks_alone_learn(
    ranks: RankPool, world: TinyWorld, layout: dict[str, int], count: int
) -> None:
    """With experts over two ranks the second one trains nothing, and yet computes what the first one waits for."""
    changed = changes(ranks, world.mixture, layout, count, train=["*.mlp.experts.local_experts.0.*"])
    assert {name for name, value in changed.items() if value} == {
        f"decoder.layers.{i}.mlp.experts.local_experts.0.linear_fc{fc}.weight" for i in (0, 1) for fc in (1, 2)
    }


def test_experts_of_some_ranks_alone_learn_as_on_one(ranks: RankPool, world: TinyWorld) -> None:
    options = {"train": ["*.1.mlp.experts.local_experts.0.*"]}
    (alone,) = ranks.run(train_jobs.losses, str(world.mixture), {}, options, 4, ranks=1)
    for spread in ranks.run(train_jobs.losses, str(world.mixture), {"ep": 2}, options, 4, ranks=2):
        assert spread == pytest.approx(alone, rel=1e-5)
    assert alone[0] != alone[-1]


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
def test_a_pattern_names_the_same_layer_and_expert_in_every_layout(
    ranks: RankPool, world: TinyWorld, layout: dict[str, int], count: int
) -> None:
    patterns = ["decoder.layers.1.self_attention.*", "*.0.mlp.experts.local_experts.3.*"]
    changed = changes(ranks, world.mixture, layout, count, freeze=patterns)
    kept = {name for name, value in changed.items() if not value}
    assert kept == {
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
    }


def test_transformer_engines_layers_have_the_names_of_megatrons_own() -> None:
    """A stand-in with the names of Transformer Engine's layers, which only a GPU computes: a mixture with grouped
    experts, 4 and 5 of the third layer, the first one here; and a dense layer. Norms are in the next linear layer."""
    from btx_nemo.train.freeze import global_names

    def module(**children: Any) -> torch.nn.Module:
        made = torch.nn.Module()
        for name, child in children.items():
            setattr(made, name, child)
        return made

    def linear() -> torch.nn.Module:
        return module(**{f"weight{i}": torch.nn.Parameter(torch.full((1,), float(i))) for i in range(2)})

    mlp = module(experts=module(linear_fc1=linear(), linear_fc2=linear()), local_expert_indices=[4, 5])

    def normed() -> torch.nn.Module:
        return module(layer_norm_weight=torch.nn.Parameter(torch.ones(1)), weight=torch.nn.Parameter(torch.zeros(1)))

    mixture = module(mlp=mlp, layer_number=3)
    dense = module(self_attention=module(linear_qkv=normed()), mlp=module(linear_fc1=normed()), layer_number=4)
    gpt = module(decoder=module(layers=torch.nn.ModuleList([mixture, dense])))
    names = {name: value.item() for name, value in global_names(gpt).items()}
    assert names == {
        "decoder.layers.3.input_layernorm.weight": 1,
        "decoder.layers.3.self_attention.linear_qkv.weight": 0,
        "decoder.layers.3.pre_mlp_layernorm.weight": 1,
        "decoder.layers.3.mlp.linear_fc1.weight": 0,
    } | {
        f"decoder.layers.2.mlp.experts.local_experts.{expert}.linear_fc{fc}.weight": expert - 4.0
        for expert in (4, 5)
        for fc in (1, 2)
    }


@pytest.mark.parametrize(("layout", "count"), [({}, 1), ({"pp": 2}, 2)], ids=["one", "pp2"])
@pytest.mark.parametrize("freeze", [[], ["embedding.*"]], ids=["trained", "frozen"])
def test_a_tied_output_layer_follows_its_embedding(
    ranks: RankPool, tied: Path, layout: dict[str, int], count: int, freeze: list[str]
) -> None:
    changed = changes(ranks, tied, layout, count, freeze=freeze)
    assert changed["embedding.word_embeddings.weight"] is (not freeze)
    assert "output_layer.weight" not in changed


@pytest.mark.parametrize("frozen", ["decoder.layers.0.*", "decoder.layers.1.*"])
def test_a_pipeline_stage_with_nothing_to_train_trains_the_others(
    ranks: RankPool, world: TinyWorld, frozen: str
) -> None:
    ends = ["embedding.*"] if "0" in frozen else ["output_layer.*", "decoder.final_layernorm.*"]
    alone = changes(ranks, world.dense, {}, 1, freeze=[frozen, *ends])
    spread = changes(ranks, world.dense, {"pp": 2}, 2, freeze=[frozen, *ends])
    assert alone == spread
    assert set(alone.values()) == {True, False}


def test_what_is_frozen_costs_no_gradient_no_moment_and_no_product(ranks: RankPool, world: TinyWorld) -> None:
    """32 tokens in 2 layers of 4 experts, 2 a token: 32 wide, feed-forward 48, 4 heads of 8, 2 groups, 288 words."""

    def cost(**options: Any) -> dict[str, int]:
        return ranks.run(train_jobs.cost, str(world.mixture), {}, options, ranks=1)[0]

    everything, no_experts, routers = cost(), cost(freeze=["*.mlp.experts.*"]), cost(train=["*.mlp.router.*"])
    expert = 3 * 32 * 48
    assert everything["gradients"] - no_experts["gradients"] == 2 * 4 * expert
    assert routers["gradients"] == 2 * 4 * 32
    for stage in (everything, no_experts, routers):
        assert stage["moments"] == 2 * stage["gradients"]
    # The weights' own gradients are as many products as the forward pass has, and the experts' are not computed.
    assert everything["products"] - no_experts["products"] == 32 * 2 * 2 * expert
    # With routers alone only they have any. Nor does a gradient go further down than the first router: not into its
    # layer's first linear layers, whose inputs need none, nor into attention before it.
    attention = 32 * (32 + 2 * 16 + 32)
    weights = 32 * (2 * attention + 2 * 2 * expert + 32 * 288)
    below = 32 * (attention + 2 * 2 * 32 * 48 + 4 * 32)
    scores = 2 * 2 * 16 * 16 * 32 * 2  # of one layer's attention: two sequences, two products, each with two gradients
    assert everything["products"] - routers["products"] == weights + below + scores


def test_weight_decay_would_show(ranks: RankPool, world: TinyWorld) -> None:
    """The other side of the law above: what is not frozen does move."""
    assert all(changes(ranks, world.mixture, {}, 1, freeze=[], weight_decay=0.5).values())


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from btx_testing.models import make_llama
    from btx_testing.runs import SIZES

    torch.manual_seed(0)
    return make_llama(tmp_path_factory.mktemp("tied") / "hf", seed=4, **{**SIZES, "tie_word_embeddings": True})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["flexolmo", "noisy_top_k"])
@pytest.mark.parametrize(("layout", "count"), [({}, 1), ({"tp": 2, "ep": 2}, 2), ({"pp": 2, "ep": 2}, 4)])
def test_rows_of_frozen_experts_keep_their_bits(
    ranks: RankPool, world: TinyWorld, layout: dict[str, int], count: int, name: str, precision: str
) -> None:
    """FlexOlmo's public row, with AdamW's decay; the other rows learn."""
    options = {"flexolmo": {"bias": True}}.get(name, {})
    options = {
        "moe": {"router": name, "options": options},
        "router": {"frozen_rows": [0, 2]},
        "precision": precision,
    }
    batch = random_batch(VOCAB, total=4, length=16)
    found: dict[str, list[bool]] = {}
    for result in ranks.run(router_jobs.changed_rows, str(world.mixture), layout, batch, options, ranks=count):
        for key, rows in result.items():
            assert found.setdefault(key, rows) == rows
    assert len(found) == 4
    for key, rows in found.items():
        assert rows == ([True, False, True] if "penalty" in key else [False, True, False, True]), key


def test_a_frozen_row_leaves_the_other_gradients_and_takes_no_part_in_the_norm(
    ranks: RankPool, world: TinyWorld
) -> None:
    batch = random_batch(VOCAB, total=2, length=16)
    results = []
    for frozen in ([], [1]):
        options = {"moe": {"router": "flexolmo"}, "router": {"frozen_rows": frozen}}
        (result,) = ranks.run(router_jobs.steps, str(world.mixture), {}, batch, options, ranks=1)
        results.append((router_jobs.whole([result]), result["norms"][0]))
    (free, norm), (held, held_norm) = results
    lost = 0.0
    for key, value in free.items():
        expected = value.clone()
        if "router.weight" in key:
            lost += value[1].square().sum().item()
            expected[1] = 0
        torch.testing.assert_close(held[key], expected)
    assert lost > 0
    assert held_norm**2 == pytest.approx(norm**2 - lost, rel=1e-5)
