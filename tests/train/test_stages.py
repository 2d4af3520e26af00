"""Stages: what trains in each, as the papers have it; what a stage may not train; and names known before a build."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from btx_testing import train_jobs
from btx_testing.models import make_llama, make_model
from btx_testing.pool import RankPool
from btx_testing.runs import SIZES, TinyWorld, copy_domain
from btx_testing.vectors import golden

from btx_nemo.config.load import load
from btx_nemo.config.schema import MoEOverride, TrainConfig
from btx_nemo.config.training import read_train_config
from btx_nemo.errors import UserError
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix
from btx_nemo.train.contents import blend_of
from btx_nemo.train.names import frozen_names, grouped, parameter_sizes
from btx_nemo.train.source import open_source
from btx_nemo.train.stages import check_stage, check_trained

GIVEN = [
    "domain=math",
    "optim.lr=1",
    "optim.min_lr=1",
    "optim.warmup_steps=0",
    "optim.weight_decay=0",
    "global_batch_size=1",
    "out=o",
]


def config(name: str, *overrides: str) -> TrainConfig:
    tokens = ["tokens=1"] if name == "bar_midtrain" else []
    return read_train_config(load("train", name, [*GIVEN, *tokens, *overrides]), name)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    seed = make_llama(root / "seed", seed=1, **{**SIZES, "tie_word_embeddings": request.param})
    out = root / "pair"
    run_mix(MixConfig(recipe="two_expert", seed=str(seed), experts={"math": str(seed)}, out=str(out), options={}))
    return out


PARTS: dict[str, Callable[[str], bool]] = {
    "anchor_ffn": lambda name: ".local_experts.0." in name,
    "domain_ffn": lambda name: ".local_experts.1." in name,
    "embeddings": lambda name: name.startswith("embedding."),
    "lm_head": lambda name: name.startswith("output_layer."),
    "attention": lambda name: ".self_attention." in name,
    "norms": lambda name: "norm" in name,
}
TABLE = {"bar_midtrain": "mid_training", "bar_sft": "sft", "bar_router": "router_training"}
TABLE |= {f"tiny_{name}": row for name, row in TABLE.items()} | {"flexolmo_expert": "mid_training"}


@pytest.mark.parametrize("name", TABLE)
def test_what_trains_is_bars_table(pair: Path, name: str) -> None:
    expected = golden("bar.freeze_table")["expected"][TABLE[name]]
    settings = config(name)
    sizes = parameter_sizes(open_source(pair).model)
    frozen = frozen_names(list(sizes), settings)
    for part, belongs in PARTS.items():
        states = {member not in frozen for member in sizes if belongs(member)}
        assert states == {expected[part]} or (part == "lm_head" and not states), part
    routers = [member for member in sizes if ".router." in member]
    assert len(routers) == 2 * 2 and not frozen & set(routers), "weight and bias of each layer"
    assert expected["router_domain_row"]
    assert settings.router.frozen_rows == ([] if expected["router_anchor_row"] else [0])


def test_a_domain_s_expert_may_see_several_sources(world: TinyWorld) -> None:
    """As `train_expert.sh NAME --config-name=btx_math` starts it."""

    def seen(*overrides: str) -> dict[str, float]:
        words = [f"data.path={world.data}", "steps=1", *overrides]
        return blend_of(read_train_config(load("train", "tiny_expert", words), ""))[0]

    assert seen("domain=math") == {"math": 1.0}
    assert seen("domain=numbers", "data.blend={math: 3, code: 1}") == {"math": 3.0, "code": 1.0}


def test_by_default_domains_of_the_kind_that_trains_are_validated(world: TinyWorld, tmp_path: Path) -> None:
    """Chats beside text would keep the documents of a text run apart."""
    for name, kind in (("math", "text"), ("code", "text"), ("talk", "chat")):
        copy_domain(world.data / "math", tmp_path / name, kind=kind)

    def validated(*overrides: str) -> list[str]:
        words = [f"data.path={tmp_path}", "steps=1", *overrides]
        return sorted(blend_of(read_train_config(load("train", "tiny_expert", words), ""))[1])

    assert validated("domain=math") == ["code", "math"]
    assert validated("domain=talk") == ["talk"]
    assert validated("domain=math", "data.valid=[talk]") == ["talk"]


def test_the_papers_other_numbers() -> None:
    router = read_train_config(load("train", "bar_router", ["global_batch_size=1"]), "")
    assert router.data.sample == 0.05 and router.epochs == 2
    assert router.optim.lr == 1e-4 and router.data.seq_length == 2048 and not any(router.router.losses.values())
    flexolmo = config("flexolmo_expert")
    assert (flexolmo.tokens, flexolmo.router.losses) == (50e9, {"btx": 0.0, "z": 0.001})
    assert read_train_config(load("train", "flexolmo_expert", ["domain=d", "global_batch_size=1"]), "").optim.lr == 9e-4
    for name, raw in (("btx_math", 102.98), ("btx_code", 99.01), ("btx_wiki", 100.0), ("btx_mix", 100.0)):
        blend = read_train_config(load("train", name, []), name).data.blend
        assert sum(blend.values()) == pytest.approx(raw), "raw, as printed"
    stages = [read_train_config(load("train", f"divmoe_stage{n}", o), "") for n, o in
              ((1, ["domain=d"]), (2, []), (3, ["tokens=1"]))]  # fmt: skip
    assert [(s.optim.lr, s.optim.min_lr, s.optim.warmup_steps) for s in stages] == [
        (5e-5, 5e-6, 50), (5e-4, 5e-5, 256), (2e-5, 2e-6, 500)
    ]  # fmt: skip
    assert {s.global_batch_size * s.data.seq_length for s in stages} == {2 << 20}, "2M tokens a step"
    nexus = read_train_config(load("train", "nexus_mix", []), "")
    assert nexus.router.losses["switch"] == 0.05
    steps = nexus.tokens / nexus.global_batch_size / nexus.data.seq_length  # type: ignore[operator]
    assert nexus.optim.warmup_steps == pytest.approx(0.1 * steps, abs=1)


@pytest.mark.parametrize("name", ["bar_midtrain", "bar_sft", "flexolmo_expert", "bar_router", "sft", "divmoe_stage3"])
def test_what_a_paper_does_not_give_is_asked_for(name: str) -> None:
    with pytest.raises(UserError, match="is required; give"):
        load("train", name, ["domain=d"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["router.frozen_rows=[]"], "router.frozen_rows=.*: the anchor's row must stay; give .0."),
        (["train=[*.mlp.experts.*]"], r"layers.0.mlp.experts.local_experts.0.linear_fc1.weight: would train"),
        (["train=[]"], "would train, but the anchor's expert must stay"),
    ],
)
def test_a_stage_of_bar_does_not_touch_the_anchor(pair: Path, overrides: list[str], message: str) -> None:
    source = open_source(pair)
    names = list(parameter_sizes(source.model))

    def check(*overrides: str) -> None:
        check_stage(config("bar_midtrain", *overrides), source.model)
        check_trained(config("bar_midtrain", *overrides), names)

    check()
    check("train=[]", "freeze=[*.local_experts.0.*]")
    with pytest.raises(UserError, match=message):
        check(*overrides)


def test_a_stage_says_which_models_it_trains(tmp_path: Path) -> None:
    dense = open_source(make_llama(tmp_path / "dense", **SIZES)).model
    with pytest.raises(UserError, match=r"stage=bar_expert trains a mixture, but .* is dense"):
        check_stage(config("bar_midtrain"), dense)
    mixture = open_source(make_model(tmp_path / "moe", "mixtral")).model
    with pytest.raises(UserError, match=r"trains a two-expert model, but .* has 4 experts and router=top_k"):
        check_stage(config("bar_midtrain"), mixture)
    for model in (dense, mixture):
        check_stage(config("sft"), model)


@pytest.mark.parametrize("name", ["llama-bias", "qwen2-window", "olmo3", "qwen2_moe-shared", "qwen3_moe", "flex_olmo"])
def test_names_and_sizes_are_those_of_the_model_that_is_built(ranks: RankPool, tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path / "hf", name)
    (built,) = ranks.run(train_jobs.parameter_counts, str(folder), ranks=1)
    assert parameter_sizes(open_source(folder).model) == built


def test_a_routers_own_parameters_have_names_too(ranks: RankPool, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "mixtral")
    names = parameter_sizes(open_source(folder, MoEOverride(router="noisy_top_k")).model)
    assert {name.split(".router.")[1] for name in names if ".router." in name} == {"weight", "noise_weight"}


def test_what_is_alike_is_one_line(tmp_path: Path) -> None:
    sizes = parameter_sizes(open_source(make_model(tmp_path / "hf", "mixtral")).model)
    rows: list[tuple[Any, ...]] = grouped(sizes, {name for name in sizes if ".local_experts.2." in name})
    assert sum(row[2] for row in rows) == sum(sizes.values())
    experts = {row[0].split(".experts.")[1]: row[1:] for row in rows if ".mlp.experts." in row[0]}
    assert set(experts) == {f"local_experts.{i}.linear_fc{fc}.weight" for i in range(4) for fc in (1, 2)}
    assert [row[-1] for key, row in sorted(experts.items()) if "fc1" in key] == [True, True, False, True]
    alike = grouped(sizes, {name for name in sizes if ".local_experts." in name})
    assert [row[0] for row in alike if ".mlp.experts." in row[0]] == [
        f"decoder.layers.*.mlp.experts.local_experts.*.linear_fc{fc}.weight" for fc in (1, 2)
    ]


def test_patterns_that_match_nothing_or_everything_are_refused() -> None:
    def frozen(*overrides: str) -> set[str]:
        return frozen_names(["a.b", "c.d"], config("tiny_mix", *overrides))

    with pytest.raises(UserError, match=r"train: 'x' matches no parameter; names look like 'a.b'"):
        frozen("train=[x]")
    with pytest.raises(UserError, match="leaves nothing to train"):
        frozen("freeze=['*']")
    assert frozen("freeze=[a.*]") == frozen("train=[c.*]") == {"a.b"}
