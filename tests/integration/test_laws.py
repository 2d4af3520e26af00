"""Laws 1 and 3 from end to end, through Megatron and through transformers, in every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import jobs, law_jobs
from btx_testing.models import hf_logits, make_llama, make_mixtral, probe_tokens
from btx_testing.pool import RankPool
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.convert.logits import hf_logits as any_hf_logits
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3},
    "tied, llama3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
}
ONE = ({"tp": 1, "pp": 1, "ep": 1}, 1)
ALL = ({"tp": 2, "pp": 2, "ep": 2}, 4)
LAYOUTS = [ONE, ({"tp": 2, "pp": 1, "ep": 2}, 2), ({"tp": 1, "pp": 2, "ep": 2}, 4), ALL]


def name_of(value: object) -> str:
    """A layout as (tp,pp,ep), for the names of tests."""
    return str(tuple(value.values())).replace(" ", "") if isinstance(value, dict) else str(value)


def mix_copies(seed: Path, out: Path, **changes: Any) -> Path:
    """Four copies of one model: three as specialists, and the seed."""
    experts = {name: str(seed) for name in ("math", "code", "prose")}
    run_mix(MixConfig(seed=str(seed), experts=experts, out=str(out), workers=2, **changes))
    return out


def from_ranks(ranks: RankPool, job: Any, folder: Path, layout: dict[str, int], count: int) -> list[torch.Tensor]:
    """Logits from every rank of the last pipeline stage."""
    results = ranks.run(job, str(folder), layout, probe_tokens(), ranks=count)
    found = [result for result in results if result is not None]
    assert len(found) == count // layout["pp"]
    return found


def equal_logits(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A seed, and the mixture of four copies of it whose routers prefer some experts much to others."""
    root = tmp_path_factory.mktemp("copies")
    seed = make_llama(root / "seed", seed=4)
    return seed, mix_copies(seed, root / "mix", router_init_std=0.5)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_law_1_copies_mixed_are_the_seed_in_transformers(tmp_path: Path, shape: str, top_k: int) -> None:
    seed = make_llama(tmp_path / "seed", seed=4, **SHAPES[shape])
    mix = mix_copies(seed, tmp_path / "mix", router_init_std=0.5, top_k=top_k)
    equal_logits(hf_logits(mix, probe_tokens()), hf_logits(seed, probe_tokens()))


@pytest.mark.parametrize(("layout", "count"), LAYOUTS, ids=name_of)
def test_law_1_copies_mixed_are_the_seed_in_megatron(
    ranks: RankPool, copies: tuple[Path, Path], layout: dict[str, int], count: int
) -> None:
    seed, mix = copies
    expected = hf_logits(seed, probe_tokens())
    for logits in from_ranks(ranks, jobs.logits, mix, layout, count):
        equal_logits(logits, expected)


SPECIALISTS = ("math", "code", "prose", "law")
EQUAL: dict[str, tuple[str, tuple[str, ...], int, dict[str, Any]]] = {
    "sparse upcycling": ("sparse_upcycling", (), 2, {"copies": 4, "every": 1}),
    "sparse upcycling, every second layer": ("sparse_upcycling", (), 2, {"copies": 4}),
    "nvidia": (
        "nvidia_upcycling",
        (),
        2,
        {"expansion": 4, "granularity": 2, "softmax": "after", "scale": "exact_down"},
    ),
    "nvidia, two copies a token": (
        "nvidia_upcycling",
        (),
        6,
        {"expansion": 4, "granularity": 3, "softmax": "after", "scale": "exact_down"},
    ),
    "divmoe": ("divmoe", SPECIALISTS, 2, {"router_init": "pack_tied"}),
    "divmoe, four slices": ("divmoe", SPECIALISTS, 4, {"router_init": "pack_tied", "slices": 4}),
    "drop upcycling at r=0": ("drop_upcycling", (), 2, {"copies": 4, "ratio": 0.0}),
    "btx without the seed": ("btx", SPECIALISTS, 3, {"include_seed": False}),
}
"""Mixtures of copies that compute the dense model, whatever their routers: recipe, specialists, top_k, options."""


def mix_equal(seed: Path, out: Path, case: str, format: str = "megatron", **changes: Any) -> Path:
    recipe, experts, top_k, options = EQUAL[case]
    run_mix(
        MixConfig(
            recipe=recipe,
            seed=str(seed),
            experts=dict.fromkeys(experts, str(seed)),
            out=str(out),
            top_k=top_k,
            router_init_std=0.5,
            workers=2,
            options={**options, **changes},
            format=format,
        )
    )
    return out


@pytest.mark.parametrize(("layout", "count"), [ONE, ALL], ids=name_of)
@pytest.mark.parametrize("case", EQUAL)
def test_law_1_holds_for_every_recipe_in_megatron(
    ranks: RankPool, copies: tuple[Path, Path], tmp_path: Path, case: str, layout: dict[str, int], count: int
) -> None:
    seed, _ = copies
    mix = mix_equal(seed, tmp_path / "mix", case)
    expected = hf_logits(seed, probe_tokens())
    for logits in from_ranks(ranks, jobs.logits, mix, layout, count):
        equal_logits(logits, expected)


@pytest.mark.parametrize("case", EQUAL)
def test_law_1_holds_for_every_recipe_in_transformers(copies: tuple[Path, Path], tmp_path: Path, case: str) -> None:
    seed, _ = copies
    mix = mix_equal(seed, tmp_path / "mix", case, "hf")
    kind = json.loads((mix / "config.json").read_text())["model_type"]
    assert kind == {"divmoe": "btx_moe", "divmoe, four slices": "btx_moe"}.get(
        case, "qwen2_moe" if "every second" in case else "mixtral"
    )
    equal_logits(any_hf_logits(mix, probe_tokens()), hf_logits(seed, probe_tokens()))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("divmoe", {"router_init": "random"}),
        ("divmoe", {"scale_mode": "paper"}),
        ("divmoe", {"scale_mode": "cuberoot_consistent"}),
        ("nvidia", {"softmax": "before"}),
        ("nvidia", {"scale": "cuberoot"}),
        ("drop upcycling at r=0", {"ratio": 0.1}),
    ],
)
def test_law_1_does_not_hold_where_the_papers_do_not_say_so(
    ranks: RankPool, copies: tuple[Path, Path], tmp_path: Path, case: str, changes: dict[str, Any]
) -> None:
    """The same tests see what random routers, the papers' approximate scales and drawn neurons change."""
    seed, _ = copies
    mix = mix_equal(seed, tmp_path / "mix", case, **changes)
    (logits,) = from_ranks(ranks, jobs.logits, mix, *ONE)
    assert float((logits - hf_logits(seed, probe_tokens())).abs().max()) > 0.01


@pytest.mark.parametrize(("layout", "count"), [ONE, ALL], ids=name_of)
def test_law_1_holds_for_tied_embeddings_and_scaled_rope(
    ranks: RankPool, tmp_path: Path, layout: dict[str, int], count: int
) -> None:
    seed = make_llama(tmp_path / "seed", seed=4, **SHAPES["tied, llama3"])
    mix = mix_copies(seed, tmp_path / "mix")
    expected = hf_logits(seed, probe_tokens())
    for logits in from_ranks(ranks, jobs.logits, mix, layout, count):
        equal_logits(logits, expected)


def test_law_1_can_fail(copies: tuple[Path, Path], tmp_path: Path) -> None:
    """One expert of one layer scaled by 1.05: what the tests above would see of a small mistake."""
    from safetensors.torch import save_file

    seed, mix = copies
    shutil.copytree(mix, tmp_path / "mix")
    tensors = load_folder(mix)
    tensors["model.layers.2.block_sparse_moe.experts.1.w2.weight"] *= 1.05
    save_file(tensors, tmp_path / "mix" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError):
        equal_logits(hf_logits(tmp_path / "mix", probe_tokens()), hf_logits(seed, probe_tokens()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("shape", SHAPES)
def test_law_3_export_of_import_is_the_same_bits(tmp_path: Path, shape: str, kind: str, dtype: torch.dtype) -> None:
    folder = make_llama(tmp_path / "hf", seed=5, dtype=dtype, **SHAPES[shape])
    if kind == "mixture":
        folder = mix_copies(folder, tmp_path / "mix")
    import_hf(folder, tmp_path / "ckpt", workers=2)
    export_hf(tmp_path / "ckpt", tmp_path / "back", shard_size=300_000, workers=2)
    assert {tensor.dtype for tensor in load_folder(folder).values()} == {dtype}
    assert same_bits(load_folder(folder), load_folder(tmp_path / "back"))


@pytest.mark.parametrize(("layout", "count"), [ONE, ALL], ids=name_of)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_megatron_s_own_reader_loads_what_import_wrote(
    ranks: RankPool, tmp_path: Path, kind: str, layout: dict[str, int], count: int
) -> None:
    folder = make_llama(tmp_path / "hf", seed=6) if kind == "dense" else make_mixtral(tmp_path / "hf", seed=6)
    layout = {**layout, "ep": layout["ep"] if kind == "mixture" else 1}
    import_hf(folder, tmp_path / "ckpt", workers=2)
    expected = hf_logits(folder, probe_tokens())
    for logits in from_ranks(ranks, law_jobs.megatron_loads, tmp_path / "ckpt", layout, count):
        equal_logits(logits, expected)


@pytest.mark.parametrize(
    ("kind", "changes", "precision"),
    [
        ("dense", {}, "fp32"),
        ("dense", SHAPES["tied"], "fp32"),
        ("mixture", {}, "fp32"),
        ("mixture", SHAPES["tied, llama3"], "fp32"),
        ("dense", {"tie_word_embeddings": True}, "bf16"),
    ],
)
def test_export_reads_what_megatron_s_own_writer_saved_of_a_live_model(
    ranks: RankPool, tmp_path: Path, kind: str, changes: dict[str, Any], precision: str
) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if kind == "dense":
        folder = make_llama(tmp_path / "hf", seed=7, dtype=dtype, **changes)
    else:
        folder = make_mixtral(tmp_path / "hf", seed=7, **changes)
    layout = {"tp": 2, "pp": 2, "ep": 2 if kind == "mixture" else 1}
    out = tmp_path / "ckpt"
    ranks.run(law_jobs.megatron_saves, str(folder), str(out), layout, precision, ranks=4)
    export_hf(out, tmp_path / "back", workers=2)
    original, back = load_folder(folder), load_folder(tmp_path / "back")
    assert original.keys() == back.keys()
    for name, tensor in original.items():  # norms stay fp32 in a live bf16 model
        assert torch.equal(back[name].to(tensor.dtype), tensor), name


def test_bf16_specialists_are_averaged_in_fp32(tmp_path: Path) -> None:
    """As a naive loop does it; and a sum in bf16 would have been seen."""
    names = ("seed", "math", "code", "prose")
    folders = {name: make_llama(tmp_path / name, seed=n, dtype=torch.bfloat16) for n, name in enumerate(names)}
    experts = {name: str(folders[name]) for name in names[1:]}
    run_mix(MixConfig(seed=str(folders["seed"]), experts=experts, out=str(tmp_path / "mix"), workers=2))
    sources = [load_folder(folders[name]) for name in (*names[1:], "seed")]
    mixed = load_folder(tmp_path / "mix")
    shared = [name for name in sources[0] if ".mlp." not in name]
    assert len(shared) == 2 + 1 + 4 * 6
    seen = 0
    for name in shared:
        total, narrow = torch.zeros_like(sources[0][name], dtype=torch.float32), torch.zeros_like(sources[0][name])
        for source in sources:
            total, narrow = total + source[name].float(), narrow + source[name]
        # The order of an fp32 sum may move its last bit, and so a result that lies between two bf16 numbers.
        exact = sum(source[name].double() for source in sources) / 4
        assert torch.equal(mixed[name], (total / 4).bfloat16()) or torch.equal(mixed[name], exact.bfloat16()), name
        seen += int((mixed[name] != narrow / 4).sum())
    assert seen > 1000
    for name in ("gate_proj", "up_proj", "down_proj"):
        w = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[name]
        for expert, source in enumerate(sources):
            key = f"model.layers.1.block_sparse_moe.experts.{expert}.{w}.weight"
            assert torch.equal(mixed[key], source[f"model.layers.1.mlp.{name}.weight"])


@pytest.mark.parametrize(("layout", "count"), [ONE, ALL], ids=name_of)
def test_a_mixture_of_different_specialists_survives_the_whole_way(
    ranks: RankPool, tmp_path: Path, layout: dict[str, int], count: int
) -> None:
    """HF specialists -> mix -> import -> Megatron's reader, and -> export -> transformers: one set of logits."""
    folders = {name: make_llama(tmp_path / name, seed=n) for n, name in enumerate(("seed", "math", "code", "prose"))}
    experts = {name: str(folder) for name, folder in folders.items() if name != "seed"}
    run_mix(MixConfig(seed=str(folders["seed"]), experts=experts, out=str(tmp_path / "mix"), router_init_std=0.5))
    import_hf(tmp_path / "mix", tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    expected = hf_logits(tmp_path / "mix", probe_tokens())
    assert torch.equal(hf_logits(tmp_path / "back", probe_tokens()), expected)
    for logits in from_ranks(ranks, law_jobs.megatron_loads, tmp_path / "ckpt", layout, count):
        equal_logits(logits, expected)
