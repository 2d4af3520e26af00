"""The parity table: every axis of a layout, alone and together, against one rank; and what is special about each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import jobs, router_jobs, train_jobs
from btx_testing.models import make_llama, make_mixtral, make_model
from btx_testing.pool import RankPool

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.errors import UserError
from btx_nemo.megatron.model import chunk_layers
from btx_nemo.megatron.parallel import check_batch
from btx_nemo.routers.ranks import context_positions

BATCH = jobs.random_batch(256, total=4, length=32)
ROUTER = {"losses": {"btx": 0.5, "z": 0.01}}
TABLE: list[tuple[dict[str, int], int]] = [
    ({"tp": 2}, 2),
    ({"pp": 2}, 2),
    ({"pp": 2, "vpp": 2}, 2),
    ({"cp": 2}, 2),
    ({"ep": 2}, 2),
    ({"etp": 2}, 2),
    ({}, 2),
    ({"cp": 4, "ep": 2}, 4),
    ({"tp": 2, "cp": 2, "ep": 4}, 4),
    ({"pp": 2, "cp": 2, "ep": 2}, 4),
    ({"pp": 2, "vpp": 2, "ep": 2}, 4),
    ({"tp": 2, "ep": 2, "etp": 2}, 4),
    ({"tp": 2, "pp": 2, "vpp": 2, "cp": 2, "ep": 2}, 8),
    ({"tp": 2, "pp": 2, "ep": 2, "etp": 2}, 8),
]
"""Layouts and ranks; what is left over is data parallel."""


def name_of(row: tuple[dict[str, int], int]) -> str:
    layout, count = row
    dp = LayoutConfig(**layout).dp(count)
    return "-".join(f"{axis}{size}" for axis, size in {**layout, **({"dp": dp} if dp > 1 else {})}.items())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {"dense": make_llama, "mixture": make_mixtral}
    return {kind: make(root / kind, seed=1, vocab_size=288) for kind, make in made.items()}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, folders: dict[str, Path]) -> Any:
    """What one rank does, by the model, the options and the batch; computed once."""
    known: dict[str, list[dict]] = {}

    def run(kind: str, options: dict[str, Any], batch: dict[str, torch.Tensor] = BATCH) -> list[dict]:
        key = f"{kind} {options} {int(batch['loss_mask'].sum())}"
        if key not in known:
            (result,) = ranks.run(jobs.one_step, str(folders[kind]), {}, batch, options, ranks=1)
            known[key] = result["history"]
        return known[key]

    return run


def differences(results: list[dict], expected: list[dict]) -> tuple[float, float]:
    """Largest relative difference of the loss and of the gradient norm, over steps and ranks."""
    pairs = [(ours, theirs) for result in results for ours, theirs in zip(result["history"], expected, strict=True)]
    found = [max(abs(a[key] / b[key] - 1) for a, b in pairs) for key in ("loss", "grad_norm")]
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_the_parity_table(ranks: RankPool, folders: dict[str, Path], alone: Any, row: tuple[dict, int]) -> None:
    """Three steps with accumulation, and without it but recomputed; `-s` prints the rows of docs/layouts.md."""
    layout, count = row
    dp, pp = LayoutConfig(**layout).dp(count), layout.get("pp", 1)
    whole = {"micro_batch_size": 4 // dp // (pp if "vpp" in layout else 1), "recompute": "full"}
    fp32, cells = (1e-4, 1e-4), []
    for kind, options, bounds in (
        ("dense", {}, fp32),
        ("dense", whole, fp32),
        ("mixture", {}, fp32),
        ("mixture", whole, fp32),
        ("mixture", {"precision": "bf16"}, (5e-3, 5e-2)),
    ):
        spread = layout if kind == "mixture" else {axis: n for axis, n in layout.items() if axis not in ("ep", "etp")}
        options = {"steps": 3, "router": ROUTER if kind == "mixture" else {}, **options}
        expected = alone(kind, {**options, "recompute": "none"})
        found = differences(ranks.run(jobs.one_step, str(folders[kind]), spread, BATCH, options, ranks=count), expected)
        cells.append(f"{found[0]:.0e}, {found[1]:.0e}")
        assert found[0] < bounds[0] and found[1] < bounds[1], (kind, options, found)
    print(f"\n| {name_of(row)} | {count} | " + " | ".join(cells) + " |")


@pytest.mark.parametrize("name", ["olmo3-yarn", "mistral-window", "qwen3-bias"])
def test_context_parallelism_in_every_kind_of_attention(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Sliding windows, rope that layers do not share, norms of all heads, biases, grouped queries."""
    folder, options = str(make_model(tmp_path / "hf", name, seed=1)), {"steps": 2, "micro_batch_size": 2}
    (expected,) = ranks.run(jobs.one_step, folder, {}, BATCH, options, ranks=1)
    found = differences(ranks.run(jobs.one_step, folder, {"cp": 2}, BATCH, options, ranks=2), expected["history"])
    assert max(found) < 1e-4


@pytest.mark.parametrize("per_token", [False, True], ids=["per-micro-batch", "per-token"])
@pytest.mark.parametrize(("layout", "count"), [({"cp": 2}, 2), ({"pp": 2, "vpp": 2}, 2)], ids=["cp2", "vpp2"])
def test_tokens_that_do_not_count(
    ranks: RankPool, folders: dict[str, Path], alone: Any, layout: dict[str, int], count: int, per_token: bool
) -> None:
    """Of one sequence only the end counts, of another nothing: parts of a sequence have other numbers of tokens."""
    mask = torch.ones(4, 32)
    mask[0, :25], mask[1] = 0, 0
    batch, options = {**BATCH, "loss_mask": mask}, {"steps": 2, "router": ROUTER, "per_token_loss": per_token}
    results = ranks.run(jobs.one_step, str(folders["mixture"]), layout, batch, options, ranks=count)
    assert max(differences(results, alone("mixture", options, batch))) < 1e-4


@pytest.mark.parametrize("modules", [["core_attn"], ["mlp", "moe"]], ids=["attention", "feed-forward"])
@pytest.mark.parametrize(("layout", "count"), [({}, 1), ({"cp": 2, "ep": 2}, 2)], ids=["one", "cp2-ep2"])
def test_parts_that_are_computed_again(
    ranks: RankPool, folders: dict[str, Path], alone: Any, layout: dict[str, int], count: int, modules: list[str]
) -> None:
    options = {"steps": 2, "router": ROUTER}
    again = {**options, "recompute": "selective", "recompute_modules": modules}
    results = ranks.run(jobs.one_step, str(folders["mixture"]), layout, BATCH, again, ranks=count)
    expected = alone("mixture", options)
    assert max(differences(results, expected)) < 1e-5
    assert results[0]["history"][0]["load"] == expected[0]["load"]  # counted once
    for result in results:
        assert called_twice(result) == ({"core_attention"} if "core_attn" in modules else {"router", "experts"})


WATCHED = ("input_layernorm", "linear_qkv", "core_attention", "router", "experts", "linear_fc1")


def called_twice(result: dict[str, Any]) -> set[str]:
    """Modules of the layers, by the last of their name, that each pass called twice; of WATCHED, the others once."""
    layers = {name: n for name, n in result["calls"].items() if ".layers." in name and "local_experts" not in name}
    calls = {name: {n for key, n in layers.items() if key.endswith(f".{name}")} for name in WATCHED}
    assert all(found in (set(), {1}, {2}) for found in calls.values()), calls
    return {name for name, found in calls.items() if found == {2}}


@pytest.mark.parametrize(
    ("kind", "options", "again"),
    [
        ("dense", {}, set()),
        ("dense", {"recompute": "selective", "recompute_modules": ["mlp"]}, {"linear_fc1"}),
        ("dense", {"recompute": "full"}, {"linear_qkv", "core_attention", "linear_fc1"}),
        ("mixture", {}, set()),
        ("mixture", {"recompute": "full"}, {"linear_qkv", "core_attention", "router", "experts"}),
    ],
)
def test_what_is_computed_again_runs_twice(
    ranks: RankPool, folders: dict[str, Path], kind: str, options: dict[str, Any], again: set[str]
) -> None:
    """And nothing else does."""
    (result,) = ranks.run(jobs.one_step, str(folders[kind]), {}, BATCH, {"steps": 1, **options}, ranks=1)
    assert called_twice(result) - {"input_layernorm"} == again


@pytest.mark.parametrize("router", ["top_k", "soft", "switch", "divmoe"])
def test_routers_with_experts_that_are_cut(ranks: RankPool, folders: dict[str, Path], router: str) -> None:
    """Loss, every parameter's gradient, and the statistics; tokens of other ranks come in other numbers."""
    extra = {"soft": {}, "divmoe": {"options": {"groups": 2}}}.get(router, {})
    options = {"moe": {"router": router, **extra}, "router": {"losses": {"btx": 0.5}, "input_jitter": 0.1}, "steps": 2}
    (expected,) = ranks.run(router_jobs.steps, str(folders["mixture"]), {}, BATCH, options, ranks=1)
    results = ranks.run(router_jobs.steps, str(folders["mixture"]), {"tp": 2, "etp": 2}, BATCH, options, ranks=2)
    gradients = router_jobs.whole([expected])
    for key, value in router_jobs.whole(results).items():
        torch.testing.assert_close(value, gradients[key], rtol=1e-3, atol=1e-4 * value.abs().max().item() + 1e-9)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        torch.testing.assert_close(
            torch.tensor(result["routing"]["load"]), torch.tensor(expected["routing"]["load"]), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(
    "freeze",
    [
        ["*.mlp.experts.*"],
        ["decoder.layers.0.*", "decoder.layers.2.*", "embedding.*"],  # all that the first rank has
        ["decoder.layers.1.*"],  # one of the second rank's two stages
    ],
    ids=["experts", "rank", "stage"],
)
def test_what_is_frozen_in_virtual_stages(ranks: RankPool, folders: dict[str, Path], freeze: list[str]) -> None:
    """A pattern names the same layers as on one rank, and only they keep their bits."""
    options = {"freeze": freeze, "weight_decay": 0.5}
    folder, layout = str(folders["mixture"]), {"pp": 2, "vpp": 2}
    (expected,) = ranks.run(train_jobs.changed_parameters, folder, {}, options, ranks=1)
    found: dict[str, bool] = {}
    for result in ranks.run(train_jobs.changed_parameters, folder, layout, options, ranks=2):
        found |= result
    assert found == expected and set(found.values()) == {True, False}


@pytest.mark.parametrize(("cp", "length"), [(2, 16), (4, 24)])
def test_a_context_parallel_rank_has_what_megatron_gives_it(ranks: RankPool, cp: int, length: int) -> None:
    for ours, theirs in ranks.run(jobs.context_parallel_parts, cp, length, ranks=cp):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_every_position_and_every_layer_is_had_once() -> None:
    assert [context_positions(4, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    layout, model = LayoutConfig(pp=2, vpp=3), type("Model", (), {"num_layers": 12})
    had = [list(chunk_layers(model, layout, rank, chunk)) for chunk in range(3) for rank in range(2)]
    assert had == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize(
    ("layout", "seq_length", "microbatches", "message"),
    [
        ({"tp": 4}, 30, 1, "data.seq_length=30: layout tp=4 cp=1: sequence parallelism needs a multiple of tp, 4"),
        ({"tp": 2, "cp": 2}, 36, 1, "data.seq_length=36: layout tp=2 cp=2: a multiple of 2 x cp x tp, 8"),
        ({"pp": 4, "vpp": 2}, 32, 6, "needs a multiple of pp=4 micro-batches, not 6"),
    ],
)
def test_batches_that_do_not_fit(layout: dict[str, int], seq_length: int, microbatches: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_batch(LayoutConfig(**layout), seq_length=seq_length, microbatches=microbatches)
