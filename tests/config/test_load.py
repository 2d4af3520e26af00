"""conf/ through Hydra: every file builds, overrides mean what Hydra's grammar says, mistakes are UserErrors."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from btx_testing.configs import PIPELINES, REQUIRED

from btx_nemo.config.build import build
from btx_nemo.config.load import conf_dir, load, save_resolved
from btx_nemo.config.schema import TrainConfig
from btx_nemo.config.training import read_train_config
from btx_nemo.errors import UserError
from btx_nemo.launch.config import PipelineConfig
from btx_nemo.mix.config import check_given_once, read_config
from btx_nemo.mix.recipes.base import RECIPES, get_recipe

FILES = sorted((path.parent.name, path.stem) for path in conf_dir().glob("*/[!_]*.yaml"))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BTX_SEED", "BTX_DATA", "BTX_CHATS", "BTX_RUNS"):
        monkeypatch.delenv(name, raising=False)


def train(*overrides: str, name: str = "tiny_mix") -> TrainConfig:
    return read_train_config(load("train", name, list(overrides)), name)


def built(command: str, values: dict[str, Any], name: str) -> object:
    if command == "submit":
        return build(PipelineConfig, values, where=name)
    return read_config(values, name) if command == "mix" else read_train_config(values, name)


@pytest.mark.parametrize("name", [name for command, name in FILES if command == "mix"])
def test_every_recipe_has_a_file_that_lists_its_options_at_their_defaults(name: str) -> None:
    config = read_config(load("mix", name, REQUIRED[name]), name)
    recipe = get_recipe(name)
    assert config.recipe == name and {stem for command, stem in FILES if command == "mix"} == {*RECIPES}
    assert list(config.options) == [f.name for f in dataclasses.fields(recipe.options)]
    for f in dataclasses.fields(recipe.options):
        assert f.default in (config.options[f.name], dataclasses.MISSING), f.name


@pytest.mark.parametrize("command", [("mix", "btx"), ("mix", "divmoe"), ("mix", "remove")])
def test_an_unknown_option_lists_the_known_ones(command: tuple[str, str]) -> None:
    values = load(*command, [*REQUIRED[command[1]], "copies=3"])
    with pytest.raises(UserError, match="unknown key copies; known for recipe=") as caught:
        read_config(values, "mix/x.yaml")
    own = [f.name for f in dataclasses.fields(get_recipe(command[1]).options)]
    assert all(name in str(caught.value) for name in [*own, "rng_seed", "out"])
    with pytest.raises(UserError, match="must be"):
        read_config(load(*command, [*REQUIRED[command[1]], f"{own[0]}=1.5"]), "mix/x.yaml")


def test_two_models_for_one_expert_are_refused() -> None:
    check_given_once(["experts.math=a", "experts.code=a", "+experts.math=a", "top_k=1", "top_k=2"])
    with pytest.raises(UserError, match=r"experts\.math is given twice, a and b; give it once"):
        check_given_once(["experts.math=a", "++experts.math=b"])


def test_an_operation_is_given_the_mixture_as_in() -> None:
    values = load("mix", "remove", REQUIRED["remove"])
    assert (config := read_config(values, "x")).seed == "i" and config.options["names"] == ["math"]
    with pytest.raises(UserError, match="in and seed are both given"):
        read_config({**values, "seed": "s"}, "x")


@pytest.mark.parametrize(("command", "name"), FILES)
def test_every_file_builds(command: str, name: str) -> None:
    needed = (
        [word for word in PIPELINES.get(name, []) if "=" in word] if command == "submit" else REQUIRED.get(name, [])
    )
    built(command, load(command, name, needed), name)


def test_every_file_is_seen() -> None:
    assert {"expert", "mix", "mix_frozen", "tiny_expert", "tiny_mix", "tiny_seed"} <= {name for _, name in FILES}
    assert ("mix", "btx") in FILES


@pytest.mark.parametrize(("command", "name"), [file for file in FILES if file[1] in REQUIRED])
def test_what_a_file_leaves_open_is_required(command: str, name: str) -> None:
    with pytest.raises(UserError):
        built(command, load(command, name, []), name)


@pytest.mark.parametrize("name", ["expert", "mix"])
def test_the_paper_s_numbers(name: str) -> None:
    """Branch-Train-MiX, section 4.1: AdamW, weight decay 0.1, 1e-4 after 100 steps, cosine to a tenth, 4M tokens."""
    config = train(*REQUIRED.get(name, []), name=name)
    optim = config.optim
    assert (optim.lr, optim.min_lr, optim.warmup_steps, optim.decay) == (1e-4, 1e-5, 100, "cosine")
    assert (optim.weight_decay, optim.beta1, optim.beta2, optim.clip_grad) == (0.1, 0.9, 0.95, 1.0)
    assert config.global_batch_size * config.data.seq_length == 2**22
    assert (config.router.losses, config.freeze) == ({"btx": 0.01}, [])


def test_the_frozen_variant_differs_in_nothing_else() -> None:
    frozen, plain = train(name="mix_frozen"), train(name="mix")
    assert frozen.freeze == ["*.mlp.experts.*"]
    assert dataclasses.replace(frozen, freeze=[]) == plain


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optim.lr=3e-4", ("optim", "lr"), 3e-4),
        ("optim.lr=1", ("optim", "lr"), 1.0),
        ("++optim.lr=2e-4", ("optim", "lr"), 2e-4),
        ("layout={tp:2,ep:4}", ("layout", "ep"), 4),
        ("layout.tp=2", ("layout", "tp"), 2),
        ("freeze=['*.mlp.experts.*',embedding.*]", ("freeze",), ["*.mlp.experts.*", "embedding.*"]),
        ("data.blend.math=30.16", ("data", "blend"), {"math": 30.16}),
        ("data.blend={math:1,code-py:2}", ("data", "blend"), {"math": 1.0, "code-py": 2.0}),
        ("data.valid=[math]", ("data", "valid"), ["math"]),
        ("tokenizer='a b'", ("tokenizer",), "a b"),
        ("tokenizer=null", ("tokenizer",), None),
        ("export=false", ("export",), False),
        ("domain=math", ("domain",), "math"),
    ],
)
def test_overrides(override: str, path: tuple[str, ...], value: Any) -> None:
    found: Any = train(override)
    for name in path:
        found = getattr(found, name)
    assert found == value


def test_open_mappings_take_any_key() -> None:
    values = load("mix", "btx", ["experts.math=a", "experts.code-py=b", "experts.c_2=c", "out=o"])
    assert list(values["experts"].items()) == [("math", "a"), ("code-py", "b"), ("c_2", "c")]


def test_paths_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BTX_RUNS", "/runs")
    monkeypatch.setenv("BTX_DATA", "/data")
    monkeypatch.setenv("BTX_SEED", "/seed")
    config = train("domain=law", name="tiny_expert")
    assert (config.out, config.data.path, config.init_from) == ("/runs/expert-law", "/data", "/seed")
    assert train("out=/else", "domain=law", name="tiny_expert").out == "/else"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nope=1"], "unknown key nope; known: stage"),
        (["optim.nope=1"], "unknown key optim.nope; known: lr"),
        (["optim={lr:1"], "tiny_mix.yaml: "),
        (["steps"], "tiny_mix.yaml: "),
        (["=1"], "tiny_mix.yaml: "),
        (["steps=1,2"], "tiny_mix.yaml: "),
        (["~steps"], "steps is required"),
        (["out=???"], "out is required; give out=VALUE"),
        (["out=${oc.env:NO_SUCH_VARIABLE}"], "tiny_mix.yaml: "),
        (["out=${nope}"], "tiny_mix.yaml: "),
        (["out=${out}"], "tiny_mix.yaml: "),
    ],
)
def test_mistakes_are_told_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as told:
        train(*overrides)
    assert message in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "path", ["/a=b", "/a,b", "/a#b", "/a{b", "/a[b", "/ä", "/a(b", "/it's", '/a"b', "/a'b,c", "/中", "a]", "/a\\'b"]
)
def test_how_to_quote_a_path_is_told_and_works(path: str) -> None:
    with pytest.raises(UserError) as told:
        train(f"out={path}")
    message = str(told.value)
    assert (
        f"override {'out=' + path!r}: " in message
        and "\n" not in message
        and "Exception" not in message.split("; ")[-1]
    )
    spelled = message.split("such characters: ")[1]
    (argument,) = shlex.split(spelled)
    assert train(argument).out == path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("", "override '': expected KEY=VALUE"),
        ("--x=1", "override '--x=1': expected KEY=VALUE"),
        ("hydra.run.dir=x", "unknown key hydra.run.dir"),
        ("++hydra.run.dir=x", "unknown key hydra.run.dir"),
        ("hydra/launcher=x", "unknown key hydra/launcher"),
        ("steps=1,2", "override 'steps=1,2': is a list of choices"),
        ("data.blend.ä=1", "override 'data.blend.ä=1': expected KEY=VALUE"),
        ("++optim=[1]", "override ++optim=[1]: "),
    ],
)
def test_an_override_that_cannot_be_is_named(override: str, message: str) -> None:
    with pytest.raises(UserError) as told:
        train(override)
    assert message in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["a: &x [*x]\n", "a: " + "[" * 5000, "defaults: [self]\n", "defaults: [mine]\n"])
def test_a_file_without_end_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml: "):
        load("train", "mine", [], str(tmp_path))


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    names = sorted(path.stem for path in (conf_dir() / "train").glob("*.yaml") if not path.stem.startswith("_"))
    assert {"expert", "mix", "tiny_seed"} <= set(names)
    with pytest.raises(UserError, match=f"known: {', '.join(names)}$"):
        load("train", "nope", [])
    with pytest.raises(UserError, match="known: none"):
        load("train", "nope", [], str(tmp_path))
    with pytest.raises(UserError):
        load("train", "../mix/btx", [])


def test_a_folder_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: {b: 1}\nc: ${a.b}\n")
    assert load("train", "mine", ["a.b=2"], str(tmp_path)) == {"a": {"b": 2}, "c": 2}
    (tmp_path / "mine.yaml").write_text("a: [1\n")
    with pytest.raises(UserError):
        load("train", "mine", [], str(tmp_path))


def test_loading_leaves_no_state_behind() -> None:
    first = load("train", "tiny_mix", ["steps=1"])
    assert load("train", "tiny_mix", [])["steps"] == 100
    assert load("train", "tiny_mix", ["steps=1"]) == first


def test_what_was_saved_builds_the_same_run(tmp_path: Path) -> None:
    config = train("domain=math", "data.blend={math:1}", name="tiny_seed")
    save_resolved(config, tmp_path / "resolved.yaml")
    again = build(TrainConfig, yaml.safe_load((tmp_path / "resolved.yaml").read_text()), where="resolved.yaml")
    assert again == config
    assert [path.name for path in tmp_path.iterdir()] == ["resolved.yaml"]


def test_a_configuration_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "resolved.yaml"
    save_resolved(train("steps=50"), path)
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_resolved(train("steps=60"), path)
    assert path.read_text() == before
