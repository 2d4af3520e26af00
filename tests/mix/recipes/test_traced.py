"""Every expert's every element is traced: specialists whose weights say (source, layer, part, row, column).

What each recipe must have done is written down here from the papers, not taken from the recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing.encoded import HIDDEN, LAYERS, WIDTH, decode, make_encoded, read_shared

from btx_nemo.families import names
from btx_nemo.families.source import open_source
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

SOURCES = ("seed", "math", "code", "prose", "law")
Neurons = list[tuple[int, int]]
"""(source, neuron) of an expert's neurons, in order."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoded")
    for number, name in enumerate(SOURCES):
        make_encoded(root / name, number)
    return root


def mixed(models: Path, out: Path, recipe: str, experts: tuple[str, ...], **changes: Any) -> dict[str, torch.Tensor]:
    config = MixConfig(
        recipe=recipe,
        seed=str(models / "seed"),
        experts={name: str(models / name) for name in experts},
        out=str(out),
        workers=2,
        **{"format": "megatron", **changes},
    )
    run_mix(config)
    return read_shared(out)


def check_block(block: dict[str, torch.Tensor], layer: int, neurons: Neurons, scale: dict[str, float]) -> None:
    """A feed-forward block whose neurons are these, its matrices scaled by exact numbers."""
    for part in names.PARTS:
        matrix = (block[part].double() / scale.get(part, 1.0)).T if part == "down" else block[part].double()
        assert matrix.shape == (len(neurons), HIDDEN)
        for at, (source, neuron) in enumerate(neurons):
            for column in range(HIDDEN):
                place = (column, neuron) if part == "down" else (neuron, column)
                assert decode(float(matrix[at, column])) == (source, layer, part, *place)


def block_of(tensors: dict[str, torch.Tensor], layer: int, expert: int) -> dict[str, torch.Tensor]:
    return {part: tensors.pop(names.expert(layer, expert, part)) for part in names.PARTS}


def whole(source: int) -> Neurons:
    return [(source, n) for n in range(WIDTH)]


def piece(source: int, number: int, pieces: int) -> Neurons:
    width = WIDTH // pieces
    return [(source, n) for n in range(number * width, (number + 1) * width)]


THREE = ("math", "code", "prose")
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any], list[Neurons], dict[str, float]]] = {
    "btx": ("btx", THREE, {}, [whole(s) for s in (1, 2, 3, 0)], {}),
    "btx, without the seed": ("btx", THREE, {"include_seed": False}, [whole(s) for s in (1, 2, 3)], {}),
    "btx split": ("btx", THREE, {"variant": "split"}, [piece(s, c, 2) for s in (1, 2, 3, 0) for c in (0, 1)], {}),
    "btx split in 3": (
        "btx",
        ("math",),
        {"variant": "split", "chunks": 3},
        [piece(s, c, 3) for s in (1, 0) for c in (0, 1, 2)],
        {},
    ),
    "btx blend": (
        "btx",
        THREE,
        {"variant": "blend"},
        [[neuron for s in (1, 2, 3, 0) for neuron in piece(s, j, 4)] for j in range(4)],
        {},
    ),
    "sparse_upcycling": ("sparse_upcycling", (), {"copies": 3, "every": 1}, [whole(0)] * 3, {}),
    "nvidia": (
        "nvidia_upcycling",
        (),
        {"expansion": 2, "granularity": 4, "softmax": "after", "scale": "exact_down"},
        [piece(0, e % 4, 4) for e in range(8)],
        {"down": 4.0},
    ),
    "nvidia, softmax first": (
        "nvidia_upcycling",
        (),
        {"expansion": 4, "granularity": 2, "scale": "exact_down"},
        [piece(0, e % 2, 2) for e in range(8)],
        {"down": 8.0},
    ),
    "nvidia, unscaled": (
        "nvidia_upcycling",
        (),
        {"expansion": 2, "granularity": 2, "scale": "none"},
        [piece(0, e % 2, 2) for e in range(4)],
        {},
    ),
    "divmoe": ("divmoe", THREE, {}, [piece(s, j, 2) for s in (1, 2, 3) for j in (0, 1)], {"down": 2.0}),
    "divmoe, tied": (
        "divmoe",
        ("math", "code", "prose", "law"),
        {"router_init": "pack_tied"},
        [piece(s, (slot + s - 1) % 2, 2) for s in (1, 2, 3, 4) for slot in (0, 1)],
        {"down": 2.0},
    ),
    "drop at 0": ("drop_upcycling", (), {"copies": 3, "ratio": 0.0}, [whole(0)] * 3, {}),
    "drop at 0, fine-grained": (
        "drop_upcycling",
        (),
        {"copies": 2, "ratio": 0.0, "granularity": 3},
        [piece(0, e % 3, 3) for e in range(6)],
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_are_made_of_what_the_paper_says(models: Path, tmp_path: Path, case: str) -> None:
    recipe, experts, options, expected, scale = CASES[case]
    tensors = mixed(models, tmp_path / "mix", recipe, experts, options=options)
    moe = open_source(tmp_path / "mix").config.moe
    assert moe is not None and moe.num_experts == len(expected) == len(moe.experts)
    for layer in range(LAYERS):
        for number, neurons in enumerate(expected):
            check_block(block_of(tensors, layer, number), layer, neurons, scale)
    assert not [name for name in tensors if ".mlp." in name and ".mlp.gate." not in name]


def members_mean(*sources: int) -> Callable[[float], float]:
    return lambda base: base + sum(sources) / len(sources)


MEANS = {
    "btx": ("btx", THREE, {}, members_mean(0, 1, 2, 3)),
    "btx, without the seed": ("btx", THREE, {"include_seed": False}, members_mean(1, 2, 3)),
    "divmoe": ("divmoe", THREE, {}, members_mean(0, 1, 2, 3)),
    "divmoe base": ("divmoe", THREE, {"nonexpert_init": "base"}, members_mean(0)),
    "sparse": ("sparse_upcycling", (), {"copies": 2}, members_mean(0)),
    "nvidia": ("nvidia_upcycling", (), {"expansion": 2, "granularity": 2}, members_mean(0)),
    "drop": ("drop_upcycling", (), {"copies": 2}, members_mean(0)),
    "two experts": ("two_expert", ("math",), {}, members_mean(0)),
}


@pytest.mark.parametrize("case", MEANS)
def test_every_average_has_its_own_denominator(models: Path, tmp_path: Path, case: str) -> None:
    """SPEC of each paper: BTX over all with the seed, DivMoE with the base; upcycling keeps."""
    recipe, experts, options, mean = MEANS[case]
    tensors = mixed(models, tmp_path / "mix", recipe, experts, options=options)
    dense = sorted(read_shared(models / "seed"))
    seen = 0
    for number, name in enumerate(dense):
        if not names.parse_ffn(name):
            assert tensors[name].unique().tolist() == [mean(1000.0 * number)], name
            seen += 1
    assert seen == 3 + 6 * LAYERS


def test_divmoe_takes_one_specialist_per_layer_when_asked(models: Path, tmp_path: Path) -> None:
    options = {"nonexpert_init": "random"}
    tensors = mixed(models, tmp_path / "mix", "divmoe", THREE, options=options)
    again = mixed(models, tmp_path / "again", "divmoe", THREE, options=options)
    other = mixed(models, tmp_path / "other", "divmoe", THREE, options=options, rng_seed=3)
    chosen: dict[int | None, set[float]] = {}
    for number, name in enumerate(sorted(read_shared(models / "seed"))):
        if not names.parse_ffn(name):
            (value,) = (tensors[name] - 1000 * number).unique().tolist()
            chosen.setdefault(names.layer_of(name), set()).add(value)
    assert all(len(values) == 1 and values < {1.0, 2.0, 3.0} for values in chosen.values())
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert any(not torch.equal(tensors[name], other[name]) for name in tensors if "norm" in name)


def test_sparse_upcycling_leaves_every_second_layer_dense(models: Path, tmp_path: Path) -> None:
    tensors = mixed(models, tmp_path / "mix", "sparse_upcycling", (), options={"copies": 2})
    assert open_source(tmp_path / "mix").config.moe.layers == [1]  # type: ignore[union-attr]
    check_block({part: tensors[names.ffn(0, part)] for part in names.PARTS}, 0, whole(0), {})
    for expert in (0, 1):
        check_block(block_of(tensors, 1, expert), 1, whole(0), {})
    assert not any(name.startswith("model.layers.0.mlp.gate.") for name in tensors)


def test_a_drop_upcycled_expert_keeps_the_neurons_that_were_not_chosen(models: Path, tmp_path: Path) -> None:
    tensors = mixed(models, tmp_path / "mix", "drop_upcycling", (), options={"copies": 4, "ratio": 0.25})
    separate = mixed(
        models, tmp_path / "i", "drop_upcycling", (), options={"copies": 4, "ratio": 0.25, "independent": True}
    )
    sets = []
    for layer in range(LAYERS):
        for expert in range(4):
            kept = [kept_neurons(tensors, layer, expert, part) for part in names.PARTS]
            assert kept[0] == kept[1] == kept[2] and len(kept[0]) == WIDTH - WIDTH // 4
            sets.append(kept[0])
            apart = [kept_neurons(separate, layer, expert, part) for part in names.PARTS]
            assert all(len(each) == WIDTH - WIDTH // 4 for each in apart)
            assert not apart[0] == apart[1] == apart[2]
    assert len(set(sets)) > 4, "experts and layers choose for themselves"


def kept_neurons(tensors: dict[str, torch.Tensor], layer: int, expert: int, part: str) -> frozenset[int]:
    from btx_testing.encoded import coded

    matrix, dense = tensors[names.expert(layer, expert, part)], coded(0, layer, part)
    same = (matrix == dense).T if part == "down" else matrix == dense
    return frozenset(n for n in range(WIDTH) if bool(same[n].all()))


@pytest.mark.parametrize("recipe", ["btx", "drop_upcycling", "nvidia_upcycling", "divmoe", "two_expert"])
def test_bits_depend_neither_on_workers_nor_on_the_format(models: Path, tmp_path: Path, recipe: str) -> None:
    """What is fresh is drawn by (seed, shared name). Formats: where Hugging Face has the architecture."""
    experts: tuple[str, ...] = {"btx": THREE, "divmoe": THREE, "two_expert": ("math",)}.get(recipe, ())
    first = mixed(models, tmp_path / "a", recipe, experts, rng_seed=11)
    config = MixConfig(
        recipe=recipe,
        seed=str(models / "seed"),
        experts={name: str(models / name) for name in experts},
        out=str(tmp_path / "b"),
        rng_seed=11,
        workers=7,
        format="hf" if recipe in ("btx", "drop_upcycling") else "megatron",
        shard_size=3000,
    )
    run_mix(config)
    second = read_shared(tmp_path / "b")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_nvidia_rows_are_tied_within_a_copy_and_drawn_apart_from_others(models: Path, tmp_path: Path) -> None:
    tensors = mixed(models, tmp_path / "mix", "nvidia_upcycling", (), options={"expansion": 3, "granularity": 2})
    first, second = (tensors[names.router(layer)] for layer in range(LAYERS))
    assert torch.equal(first[0::2], first[1::2]) and not torch.equal(first, second)
    assert len(first.unique(dim=0)) == 3


def test_pack_tied_rows(models: Path, tmp_path: Path) -> None:
    options = {"router_init": "pack_tied"}
    four = ("math", "code", "prose", "law")
    rows = mixed(models, tmp_path / "mix", "divmoe", four, options=options)[names.router(0)]
    assert torch.equal(rows[:4], rows[:1].expand(4, -1)) and torch.equal(rows[4:], rows[4:5].expand(4, -1))
    assert not torch.equal(rows[0], rows[4])
