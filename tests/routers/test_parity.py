"""Every router at every layout: loss, each parameter's gradient and the statistics are those of one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import router_jobs
from btx_testing.jobs import random_batch
from btx_testing.models import make_mixtral
from btx_testing.pool import RankPool
from safetensors.torch import save_file

from btx_nemo.families.config import ModelConfig, MoEConfig

ROUTERS: dict[str, dict[str, Any]] = {
    "top_k": {"moe": {"router": "top_k"}},
    "top_k-before": {"moe": {"options": {"softmax": "before", "renormalise": False}, "top_k": 1}},
    "switch": {"moe": {"router": "switch", "options": {"capacity_factor": 1.0}}},
    "switch-dropout": {
        "moe": {"router": "switch", "options": {"capacity_factor": 0.0}},
        "dropout": {"hidden": 0.1, "expert": 0.4},
    },
    "soft": {"moe": {"router": "soft"}},
    "sample_top1": {"moe": {"router": "sample_top1"}, "first": 3000},
    "noisy_top_k": {"moe": {"router": "noisy_top_k"}},
    "nexus": {
        "moe": {
            "router": "nexus",
            "options": {"embedding_size": 12, "embeddings": "?"},
            "shared_expert_intermediate_size": 40,
        }
    },
    "expert_choice": {"moe": {"router": "expert_choice", "options": {"allow_non_causal": True}}},
    "divmoe": {"moe": {"router": "divmoe", "options": {"groups": 2}}},
    "flexolmo": {"moe": {"router": "flexolmo", "options": {"bias": True}}},
}
LOSSES = {"btx": 0.5, "switch": 0.5, "hf": 0.1, "switch_seq": 0.3, "importance": 0.2, "z": 0.1}
# (tp, pp, ep, dp), dp being the ranks that have the same expert: Megatron's data-parallel ranks are ep * dp / tp.
LAYOUTS = [
    pytest.param({"tp": 2, "pp": 1, "ep": 2}, 2, 1, id="tp2-ep2"),
    pytest.param({"tp": 1, "pp": 2, "ep": 2}, 4, 2, id="pp2-ep2"),
    pytest.param({"tp": 1, "pp": 1, "ep": 2}, 4, 4, id="ep2-dp2"),
    pytest.param({"tp": 2, "cp": 2, "ep": 2}, 4, 1, id="tp2-cp2-ep2"),
]
BATCH = random_batch(256, total=16, length=16)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_mixtral(tmp_path_factory.mktemp("mixtral") / "hf", seed=1, num_hidden_layers=2)
    (folder / "domains").mkdir()
    embeddings = torch.randn(4, 12, generator=torch.Generator().manual_seed(4))
    save_file({"domain_embeddings": embeddings}, folder / "domains" / "model.safetensors")
    ROUTERS["nexus"]["moe"]["options"]["embeddings"] = str(folder / "domains")
    return folder


def options(name: str, **more: Any) -> dict[str, Any]:
    losses = LOSSES | ({"load": 0.2} if name == "noisy_top_k" else {})
    losses = {"z": 0.1} if name == "expert_choice" else losses
    return {**ROUTERS[name], "router": {"losses": losses, "input_jitter": 0.1}, **more}


def close(ours: Any, theirs: Any, rel: float = 1e-4, atol: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=rel, atol=atol)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_step_is_the_same_at_every_layout(ranks: RankPool, mixtral: Path, name: str) -> None:
    """With one and with four micro-batches on each data-parallel rank (with context parallelism, with one)."""
    alone: dict[tuple[int, int], dict] = {}
    for parameter in LAYOUTS:
        layout, count, dp = parameter.values
        for microbatches, rows in ((1, 2), (4, 1))[: 1 if "cp" in layout else 2]:  # type: ignore[operator]
            total = microbatches * rows * dp  # type: ignore[operator]
            settings, batch = options(name, micro_batch_size=rows, steps=2), first(total)
            if (total, rows) not in alone:
                (alone[total, rows],) = ranks.run(router_jobs.steps, str(mixtral), {}, batch, settings, ranks=1)
            results = ranks.run(router_jobs.steps, str(mixtral), layout, batch, settings, ranks=count)
            agree(results, alone[total, rows])


def first(total: int) -> dict[str, torch.Tensor]:
    """The first sequences of the batch."""
    return {key: value[:total] for key, value in BATCH.items()}


@pytest.mark.parametrize(
    ("layout", "count"),
    [({"ep": 4}, 4), ({"ep": 2}, 2), ({"tp": 2, "ep": 1}, 2), ({"tp": 2, "ep": 4}, 4)],
    ids=["ep4", "ep2", "tp2-ep1", "tp2-ep4-dp2"],
)
def test_groups_may_be_more_or_fewer_than_expert_parallel_ranks(
    ranks: RankPool, mixtral: Path, layout: dict[str, int], count: int
) -> None:
    """Two groups of two on one, two and four ranks: a rank has two groups, one, or half of one."""
    (alone,) = ranks.run(router_jobs.steps, str(mixtral), {}, first(4), options("divmoe", steps=2), ranks=1)
    agree(ranks.run(router_jobs.steps, str(mixtral), layout, first(4), options("divmoe", steps=2), ranks=count), alone)


@pytest.mark.parametrize(
    ("layout", "count"), [({"tp": 2, "ep": 2}, 2), ({"pp": 2}, 2), ({"tp": 2, "pp": 2, "ep": 2}, 4)]
)
def test_global_counts_are_the_same_where_the_batch_is_cut_alike(
    ranks: RankPool, mixtral: Path, layout: dict[str, int], count: int
) -> None:
    """Four micro-batches, each with the counts so far; also when they are computed again in the backward pass."""
    settings = {"moe": {"router": "top_k"}, "router": {"losses": {"switch_global": 0.5}}, "steps": 2}
    (alone,) = ranks.run(router_jobs.steps, str(mixtral), {}, first(4), settings, ranks=1)
    for recompute in ("none", "full"):
        more = {**settings, "recompute": recompute}
        agree(ranks.run(router_jobs.steps, str(mixtral), layout, first(4), more, ranks=count), alone)


@pytest.mark.parametrize(("layout", "count"), [({"pp": 2}, 2), ({"tp": 2, "ep": 2}, 2)])
def test_a_model_may_have_dense_layers(ranks: RankPool, layout: dict[str, int], count: int) -> None:
    """With pipelining, a stage then has no router at all."""
    model = ModelConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, head_dim=8,
        vocab_size=256, moe=MoEConfig(num_experts=4, layers=[1]),
    )  # fmt: skip
    settings = {"fresh": model, "router": {"losses": LOSSES}, "dropout": {"hidden": 0.1, "expert": 0.4}, "steps": 2}
    (alone,) = ranks.run(router_jobs.steps, "", {}, first(4), settings, ranks=1)
    assert alone["routing"]["load"][0] == [0.0] * 4 and sum(alone["routing"]["load"][1]) == pytest.approx(1)
    agree(ranks.run(router_jobs.steps, "", layout, first(4), settings, ranks=count), alone)


def agree(results: list[dict], alone: dict) -> None:
    expected = router_jobs.whole([alone])
    assert all(torch.isfinite(value).all() for value in expected.values())
    for result in results:
        close(result["losses"], alone["losses"])
        close(result["norms"], alone["norms"])
        assert result["routing"].keys() == alone["routing"].keys()
        for key, value in alone["routing"].items():
            if key == "losses":
                assert result["routing"]["losses"].keys() == value.keys()
                for name in value:
                    close(result["routing"]["losses"][name], value[name])
            else:
                close(result["routing"][key], value)
    found = router_jobs.whole(results)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(
            found[key], value, rtol=1e-3, atol=1e-4 * scale + 1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", ROUTERS)
def test_recomputation_routes_the_same_again(ranks: RankPool, mixtral: Path, name: str) -> None:
    (alone,) = ranks.run(router_jobs.steps, str(mixtral), {}, first(4), options(name), ranks=1)
    for layout, count in (({}, 1), ({"pp": 2}, 2)):  # with pipelining, other micro-batches come in between
        again = options(name, recompute="full")
        agree(ranks.run(router_jobs.steps, str(mixtral), layout, first(4), again, ranks=count), alone)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_stays_fp32_in_a_bf16_model(ranks: RankPool, mixtral: Path, name: str) -> None:
    (result,) = ranks.run(router_jobs.steps, str(mixtral), {}, first(4), options(name, precision="bf16"), ranks=1)
    assert result["dtypes"] and set(result["dtypes"].values()) == {"torch.float32"}
    assert all(math.isfinite(loss) for loss in result["losses"])
