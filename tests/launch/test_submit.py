"""`submit`: the printed scripts against golden ones, what is left out or refused, and the run without Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from btx_testing.commands import CommandServer, wait_until
from btx_testing.configs import BAR
from btx_testing.configs import PIPELINES as WORDS
from btx_testing.mixing import SMALL, make_models, mix_arguments
from btx_testing.models import make_llama
from btx_testing.runs import TinyWorld, logged_step
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.errors import BtxError, EnvironmentLacks, Stopped, UserError
from btx_nemo.launch import slurm
from btx_nemo.launch import submit as module
from btx_nemo.launch.decide import redone
from btx_nemo.launch.graph import Job, graph
from btx_nemo.launch.identity import made_path
from btx_nemo.launch.settings import RESERVED
from btx_nemo.launch.submit import scripts_dir, submit

REPO = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
PIPELINES = {
    "alike": ["math", "code-py", "expert.set.steps=10", "expert.gpus=4", "joint.set.layout.ep=2"],
    "different": [
        *("math", "code", "experts.math.nodes=4", "experts.math.set.optim.lr=5e-5", "experts.code.time='08:00:00'"),
        *("experts.code.stages.mid.set.steps=7", "mix.set.top_k=1", "train=[router,joint]", "joint.set.note='a $(x)'"),
    ],
    "tiny": [],
    "bar": ["experts.tool.stages.mid=null"],
}
CONFIGS = {"tiny": "pipeline_tiny", "bar": "bar_tiny"}


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Stage -> what `submit` printed of it last."""
    return {stage: rest for stage, _, rest in (line.partition(": ") for line in capsys.readouterr().out.splitlines())}


@pytest.mark.parametrize("name", PIPELINES)
def test_printed_scripts_are_the_golden_ones(
    name: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "absent", lambda: "")
    monkeypatch.setenv("BTX_PYTHON", "/opt/python")
    monkeypatch.setattr(slurm, "named", lambda names: [])
    monkeypatch.setattr(slurm, "largest_array", lambda: 1001)
    options = {
        "runs": runs,
        "config_name": CONFIGS.get(name, "pipeline"),
        "dry_run": True,
        "allow_missing": name == "different",
    }
    submit(PIPELINES[name], sbatch_options=["--partition=gpu"], **options)
    printed = capsys.readouterr().out.replace(str(runs), "{runs}").replace(str(REPO / "slurm"), "{slurm}")
    printed = re.sub("--comment=btx-nemo:[0-9a-f]{16}", "--comment={digest}", printed)
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(printed)
    assert printed == golden.read_text()
    assert [p.name for p in runs.iterdir()] == ["seed"]


@pytest.mark.parametrize("domain", ["a/b", "a b", "$(touch x)", "", "-x", "A", "ä", "a\n", "3d", "seed"])
def test_bad_domain_is_refused(domain: str, runs: Path) -> None:
    with pytest.raises(UserError, match="rename the domain"):
        submit(["math", domain], runs=runs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no domain; name at least one"),
        (["math", "math"], "'math' is named twice"),
        (["math", "experts.A={}"], "'A': only a-z"),
        (["math", "until=lunch"], "until=lunch: unknown; known: experts, mix, train, export, eval"),
        (["math", "train=[joint,router]"], "must be .joint., .router. or .router,joint."),
        (["math", "nope=1"], "unknown key nope"),
        (["math", "experts=null"], r"experts must be a mapping, not nothing \(null\)$"),
        (["math", "experts.math.nodez=1"], "unknown key experts.math.nodez"),
        (["math", "experts.math.stages.A={}"], "'A': only a-z.*rename the stage"),
        (["math", "eval.set.x=1"], "neither config nor set"),
        (["math", "data='/a$b'"], "has a quote, a backslash, a dollar"),
        (["math", "expert.time=43200"], '"12:00:00", or minutes as "43200"'),
        (["math", "local_jobs=0"], "local_jobs=0: must be 1 or more"),
        (["math", "seed=/s", "seed_training={}"], "give one of them"),
        (["math", "data=/s", "demo_data=true"], "give one of them"),
        (["math", "chats=/s", "demo_chats=true"], "give one of them"),
        (["math", "anchor=/s"], "an anchor stands beside the experts in pairs; give pair.config=two_expert"),
        (["math", "anchor=/s", "anchor_training={}", "pair={}"], "give one of them"),
        (["anchor", "pair={}"], "domain 'anchor': has another meaning in a pair"),
        (["math", "anchor='{runs}/pair-math'", "pair={}"], "pair-math: starts from .*, which pair-math makes"),
        (["math", "experts.math.set.init_from='{runs}/mix'"], "expert-math: starts from .*, which mix makes"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(words: list[str], message: str, runs: Path) -> None:
    with pytest.raises(UserError, match=message):
        submit([word.replace("{runs}", str(runs)) for word in words], runs=runs)
    assert [p.name for p in runs.iterdir()] == ["seed"]


def test_settings_are_checked_before_anything_starts(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BTX_CLI")
    submit([], config_name="pipeline_tiny", runs=runs, dry_run=True)
    submit([], config_name="bar_tiny", runs=runs, dry_run=True)
    for word, message in (
        ("expert.config=nope", r"expert-math: --config-name nope: not in .*; known: .*\bexpert,"),
        ("experts.code.set.optim.lr=fast", "expert-code: train/expert.yaml: optim.lr must be float"),
        ("joint.set.layout.tpp=2", "joint: train/mix.yaml: unknown key layout.tpp"),
        ("mix.set.top_k=two", "mix: mix/btx.yaml: top_k must be int"),
    ):
        with pytest.raises(UserError, match=message):
            submit(["math", "code", word], runs=runs)
    for words, message in (
        (
            ["mix.config=btx"],
            "mix: recipe btx takes dense models, no pairs; give mix.config=bar or flexolmo, or pair=null",
        ),
        (
            ["pair.config=btx"],
            "pair-math: recipe btx makes no model of an anchor and one expert; give pair.config=two_ex",
        ),
        (["expert.config=tiny_expert"], "expert-math: stage expert: pair makes a two-expert model; take a configurat"),
        (["expert.config=tiny_sft"], "expert-math: stage sft: pair makes a two-expert model; take a configuration of"),
        (["anchor_training.config=tiny_mix"], "anchor: stage mix trains a mixture, this is a dense model; take one of"),
        (["anchor_training.config=tiny_bar_sft"], "anchor: stage bar_expert trains a mixture, this is a dense"),
        (
            ["router.config=tiny_bar_sft", "router.set.domain=math"],
            "router: stage bar_expert trains a two-expert model, this is the mixture",
        ),
        (
            ["pair=null", "anchor_training=null"],
            "expert-math.mid: stage bar_expert trains a mixture, this is a dense model; give pair",
        ),
    ):
        with pytest.raises(UserError, match=message):
            submit(words, config_name="bar_tiny", runs=runs)
    with pytest.raises(UserError, match=r"mix: recipe bar merges two-expert models; give pair.config=two_expert"):
        submit(["math", "mix.config=bar"], runs=runs)
    with pytest.raises(UserError, match=r"submit/bar.yaml: anchor is required; give anchor=VALUE"):
        submit(["math", *BAR], config_name="bar", runs=runs)


def test_more_experts_a_token_than_the_pipeline_makes_are_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BTX_CLI")

    def went(name: str, *words: str) -> None:
        submit([*words, *(word for word in WORDS[name] if "=" in word)], config_name=name, runs=runs, dry_run=True)

    for name, words, message in (
        ("flexolmo", [], "router: moe.top_k=4: the mixture has 3 experts; give router.set.moe.top_k=3, or more dom"),
        ("pipeline", ["joint.set.moe.top_k=3", "mix.set.include_seed=false"], "joint: .* the mixture has 2 experts"),
        ("pipeline", ["joint.set.moe.top_k=7", "mix.set.variant=split"], "joint: .* the mixture has 6 experts"),
        ("pipeline", ["mix.set.top_k=4"], "mix: top_k=4: the mixture has 3 experts; give mix.set.top_k=3"),
    ):
        with pytest.raises(UserError, match=message):
            went(name, "math", "code", *words)
    went("flexolmo", "math", "code", "router.set.moe.top_k=3")
    went("pipeline", "math", "code", "joint.set.moe.top_k=9", "mix.config=divmoe")  # a number that only it knows
    (runs / "mix").mkdir()  # made by hand: how many it has is not known
    (runs / "mix" / "config.json").write_text("{}")
    went("flexolmo", "math", "code")


def test_what_scripts_set_themselves_is_refused(runs: Path) -> None:
    texts = {path.name: path.read_text() for path in scripts_dir().glob("*.sh")}
    found = {name: re.search(r'btx_arguments "(.+)" "\$@"', text) for name, text in texts.items()}
    assert {name: tuple(words[1].split()) for name, words in found.items() if words} == RESERVED
    for word, message in (
        ("joint.set.init_from=/x", "joint: set.init_from: train_mix.sh sets it itself"),
        ("expert.set.domain=x", "expert-math: set.domain: train_expert.sh"),
        ("+mix.set.experts.code=/x", "mix: set.experts.code: mix.sh"),
        ("export.set.out=/x", "export: set.out: export.sh"),
    ):
        with pytest.raises(UserError, match=message):
            submit(["math", word], runs=runs)


def test_missing_scripts(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(runs / "a" / "b" / "c.py"))
    with pytest.raises(EnvironmentLacks, match="install btx-nemo again"):
        submit(["math"], runs=runs)


def test_whole_pipeline_here_and_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit(["math", "code", "local_jobs=2"], runs=runs)
    assert json.loads((runs / "export" / "manifest.json").read_text())["in"] == f"{runs}/joint"
    mix = json.loads((runs / "mix" / "manifest.json").read_text())
    assert (mix["experts.math"], mix["experts.code"]) == (f"{runs}/expert-math/hf", f"{runs}/expert-code/hf")
    capsys.readouterr()
    submit(["math", "code"], runs=runs)
    assert set(said(capsys).values()) == {"done"}
    assert len((runs / "joint" / "starts.jsonl").read_text().splitlines()) == 1
    shutil.rmtree(runs / "expert-math" / "hf")
    with pytest.raises(UserError, match=r"mix: the input expert-math is missing: .*bring it back"):
        submit(["math", "code"], runs=runs)


def test_an_expert_added_or_trained_again_makes_stale_only_what_it_is_in(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def went(*words: str, redo: tuple[str, ...] = ()) -> dict[str, str]:
        """Stage -> why it was started."""
        capsys.readouterr()
        submit([*words, "local_jobs=2"], runs=runs, redo=redo)
        lines = [line.partition(": started (") for line in capsys.readouterr().out.splitlines()]
        return {stage: why.partition("),")[0] for stage, started, why in lines if started}

    def joint() -> list[str]:
        return (runs / "joint" / "starts.jsonl").read_text().splitlines()

    went("math", "code")
    added = went("math", "code", "law")
    assert list(added) == ["expert-law", "mix", "joint", "export", "eval"]
    assert (added["mix"], added["joint"]) == ("stale: another expert-law", "follows mix")
    names = sorted(path.name for path in (runs / "stale").iterdir())
    assert names == ["eval.1", "export.1", "joint.1", "mix.1"], "what was made before was not kept"

    before = joint()
    again = went("math", "code", "law", redo=("expert-math",))
    assert again == {"expert-math": "to be made again", "mix": "follows expert-math"} | {
        stage: f"follows {other}" for stage, other in (("joint", "mix"), ("export", "joint"), ("eval", "joint"))
    }
    assert joint() == before, "the same bits came out, and yet the mixture was trained again"

    with pytest.raises(UserError, match=r"was made with steps=unset, now 7; .* --redo expert-math"):
        went("math", "code", "law", "experts.math.set.steps=7")
    went("math", "code", "law", "experts.math.set.steps=7", "expert.set.layout.tp=2", redo=("expert-math",))
    assert joint() != before, "the mixture is of an expert that is no more"
    assert went("math", "code", "law", "experts.math.set.steps=7") == {}, "a layout changes no result"

    with pytest.raises(UserError, match="--redo nope: no such stage; known: expert-math"):
        went("math", redo=("nope",))


def test_bar_here_and_an_expert_added_later(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Anchor, pairs, stages, the merge of what was trained, routers, export."""

    def went(*words: str, **more: Any) -> dict[str, str]:
        """Stage -> why it was started, or would be."""
        capsys.readouterr()
        submit([*words, "local_jobs=2", "expert.set.steps=1"], config_name="bar_tiny", runs=runs, **more)
        out = capsys.readouterr().out
        if more:
            return dict(line[2:].split(": ", 1) for line in out.splitlines() if line[0] == "#" and ": done" not in line)
        lines = [line.partition(": started (") for line in out.splitlines()]
        return {stage: why.partition("),")[0] for stage, started, why in lines if started}

    def made(stage: str) -> dict[str, str]:
        return json.loads((runs / stage / "manifest.json").read_text())

    def told(stage: str) -> list[str]:
        return json.loads((runs / stage / "starts.jsonl").read_text())["argv"]

    shutil.rmtree(runs / "seed")
    roots, math = ["data", "chats", "seed", "anchor"], ["pair-math", "expert-math.mid", "expert-math"]
    end = ["mix", "router", "export", "eval"]
    assert sorted(went("~experts.code")) == sorted([*roots, *math, *end])
    pair, mix = made("pair-math"), made("mix")
    assert (pair["seed"], pair["experts.math"]) == (f"{runs}/anchor/hf", f"{runs}/seed/hf")
    assert (mix["seed"], mix["experts.math"]) == (f"{runs}/anchor/hf", f"{runs}/expert-math")
    assert f"init_from='{runs}/pair-math'" in told("expert-math.mid")
    assert f"init_from='{runs}/expert-math.mid'" in told("expert-math")
    assert f"init_from='{runs}/mix'" in told("router") and made("export")["in"] == f"{runs}/router"

    code = "experts.code.stages.mid=null"
    added = went(code)
    assert list(added) == ["pair-code", "expert-code", *end] and added["mix"] == "stale: another expert-code"
    assert went(code) == {}
    assert list(went(code, redo=["expert-math"], dry_run=True)) == ["expert-math", *end]
    assert list(went(code, redo=["anchor"], dry_run=True)) == ["anchor", *math, "pair-code", "expert-code", *end]
    jobs = pipeline(code, runs=runs)
    assert redone(jobs, runs, ["seed"]) == ["seed"], "what is made of it notices by itself"
    trainings = ["anchor", "expert-math.mid", "expert-math", "expert-code", "router"]
    assert redone(jobs, runs, ["chats"]) == ["chats", *trainings], "pairs and mix read no data"


def pipeline(*words: str, runs: Path, config: str = "bar_tiny") -> list[Job]:
    """The graph."""
    return graph(module._pipeline(words, config, None, runs))


def after(jobs: list[Job]) -> dict[str, tuple[str, ...]]:
    """Stage -> what it waits for."""
    return {job.name: job.after for job in jobs}


def test_a_stage_is_left_out_for_all_or_for_one(runs: Path) -> None:
    def stages(*words: str) -> list[str]:
        return [job.name for job in pipeline(*words, "until=experts", runs=runs) if job.name.startswith("expert-")]

    everyone, math = "expert.stages.mid=null", "experts.math.stages.mid={config:tiny_bar_midtrain}"
    assert stages(everyone) == ["expert-math", "expert-code"]
    assert stages(everyone, math) == ["expert-math.mid", "expert-math", "expert-code"]
    assert stages("experts.math.stages.mid=null") == ["expert-math", "expert-code.mid", "expert-code"]


def test_only_the_first_training_has_a_start_of_its_own(runs: Path) -> None:
    math = "experts.math.stages.mid.set.init_from=/x"
    for word in ("expert.set.init_from=/x", "experts.math.set.init_from=/x"):
        with pytest.raises(UserError, match=f"expert-math: set.init_from: .* give it there: {math[:-3]}, or leave"):
            pipeline(word, runs=runs)
    with pytest.raises(UserError, match=r"expert-code\.late: set.init_from"):
        pipeline("experts.code.stages.late={set:{init_from:/x}}", runs=runs)
    waits = after(pipeline(math, "experts.code.stages.mid=null", "experts.code.set.init_from=/y", runs=runs))
    assert not {"pair-math", "pair-code"} & {*waits}, "pairs that nobody trains"
    assert waits["expert-math"] == ("data", "chats", "expert-math.mid")
    assert waits["expert-code"] == waits["expert-math.mid"] == ("data", "chats"), "they are not made of the seed"
    submit([math, "expert.stages.mid.set.init_from=/x"], config_name="bar_tiny", runs=runs, dry_run=True)


def test_trainings_follow_the_data_that_they_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BTX_CLI")
    jobs = pipeline("~experts.code", runs=runs)
    (runs / "state").mkdir()
    for job in jobs:
        made_path(runs, job.name).write_text('{"inputs": {}, "settings": {}}')
    chat = ["anchor", "expert-math", "router"]
    assert redone(jobs, runs, ["chats"]) == ["chats", *chat]
    text = ["seed", "anchor", "expert-math.mid", "expert-math", "router"]
    assert redone(jobs, runs, ["data"]) == ["data", "chats", *text], "conversations are made of the text"
    other = pipeline("~experts.code", "expert.stages.mid.set.data.path=/x", runs=runs)
    assert redone(other, runs, ["chats"]) == ["chats", "anchor", "expert-math.mid", "expert-math", "router"]


def test_what_makes_an_input_is_known_by_any_of_its_names(runs: Path) -> None:
    """Through `..`, a link to the folder of runs, and where an output is itself a link."""
    (runs.parent / "link").symlink_to(runs)
    (runs.parent / "a").mkdir()
    (runs / "expert-law").symlink_to(runs / "seed")
    names = (runs / "mix" / ".." / ".." / runs.name, runs.parent / "link", runs.parent / "a" / ".." / "link")
    for given, other in [(runs, runs), *((runs, name) for name in names), *((name, runs) for name in names)]:
        words = ("math", "code", "law", f"experts.code.set.init_from='{other}/expert-math/hf'", "until=mix")
        jobs = pipeline(*words, runs=given, config="pipeline")
        assert after(jobs) == {
            "expert-math": (),
            "expert-code": ("expert-math",),
            "expert-law": (),
            "mix": ("expert-math", "expert-code", "expert-law"),
        }
        with pytest.raises(UserError, match=r"pair-math: starts from .*, which mix makes"):
            pipeline("anchor_training=null", f"anchor='{other}/mix'", runs=given)
    (runs / "expert-math").symlink_to(runs.parent / "a")
    assert after(jobs) == after(pipeline(*words, runs=given, config="pipeline"))


def test_a_pipeline_in_a_folder_of_one_s_own(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = runs.parent / "own 'conf'"
    own.mkdir()
    shutil.copy(REPO / "conf" / "submit" / "pipeline_tiny.yaml", own)
    (own / "bad.yaml").write_text("defaults: [pipeline, _self_]\nexpert: {stages: {null: {}}}\n")
    submit([], config_name="pipeline_tiny", config_path=str(own), runs=runs, dry_run=True)
    assert "# expert-prose: new" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"bad.yaml: Incompatible key type .* expert.stages .*; put quotes around"):
        submit(["math"], config_name="bad", config_path=str(own), runs=runs)


def test_flexolmo_here(runs: Path) -> None:
    """Pairs of the public model with itself, what was trained of them merged, and the routers of that."""
    submit(["math", "until=train", *WORDS["flexolmo"][3:], "expert.set.steps=1"], config_name="flexolmo", runs=runs)
    pair, mix = (json.loads((runs / stage / "manifest.json").read_text()) for stage in ("pair-math", "mix"))
    assert (pair["seed"], pair["experts.math"]) == (f"{runs}/seed", f"{runs}/seed")
    assert (mix["seed"], mix["experts.math"]) == (f"{runs}/seed", f"{runs}/expert-math")
    for stage, start in (("expert-math", "pair-math"), ("router", "mix")):
        assert f"init_from='{runs}/{start}'" in json.loads((runs / stage / "starts.jsonl").read_text())["argv"]


def test_a_pair_of_models_that_are_still_trained_is_refused(runs: Path) -> None:
    anchor = runs.parent / "anchor"
    (anchor / "checkpoints").mkdir(parents=True)
    (anchor / "resolved.yaml").touch()
    with pytest.raises(
        UserError, match=f"pair-math: failed with status 2: .*{anchor}/DONE is missing: that training is"
    ):
        submit(["math", "until=experts", "pair={}", f"anchor={anchor}"], runs=runs)


def test_an_expert_that_starts_from_another_waits_for_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["math", "code", f"experts.code.set.init_from='{runs}/expert-math'", "until=experts", "local_jobs=2"]
    submit(words, runs=runs)
    first, second = (json.loads((runs / f"expert-{d}" / "starts.jsonl").read_text()) for d in ("math", "code"))
    assert second["begin"] >= first["end"]


def test_another_seed_makes_everything_stale(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit(["math", "until=mix"], runs=runs)
    (runs / "seed" / "config.json").write_text('{"other": 1}')
    capsys.readouterr()
    submit(["math", "until=mix"], runs=runs, dry_run=True)
    assert "# expert-math: stale: another from" in capsys.readouterr().out
    submit(["math", "until=mix"], runs=runs)
    assert sorted(path.name for path in (runs / "stale").iterdir()) == ["expert-math.1", "mix.1"]


def test_a_missing_seed_makes_nothing_stale(runs: Path) -> None:
    submit(["math", "until=mix"], runs=runs)
    before = sorted(str(path) for path in runs.rglob("*"))
    (runs / "seed").rename(runs.parent / "away")
    for words in (["math", "until=mix"], ["math", "code", "until=mix", "seed=/nope"]):
        for dry_run in (True, False):
            with pytest.raises(UserError, match=r"expert-math: the input from is missing: .* bring it back"):
                submit(words, runs=runs, dry_run=dry_run)
    (runs.parent / "away").rename(runs / "seed")
    assert sorted(str(path) for path in runs.rglob("*") if path.name != ".lock") == [
        path for path in before if not path.endswith(".lock")
    ]


def test_a_fresh_expert_stays_done(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["math", "until=experts", "expert.set.init_from=null"]
    submit(words, runs=runs)
    capsys.readouterr()
    submit(words, runs=runs)
    assert said(capsys) == {"expert-math": "done"}


def test_what_follows_data_that_are_made_again_is_made_again(runs: Path) -> None:
    shutil.rmtree(runs / "seed")
    words = ["math", "until=mix", "demo_data=true", "seed_training={}"]
    submit(words, runs=runs)
    submit(words, runs=runs, redo=("data",))
    aside = sorted(path.name for path in (runs / "stale").iterdir())
    assert aside == ["data.1", "expert-math.1", "seed.1"], "the mix reads no data, and the expert is the same"
    assert (runs / "expert-math" / "DONE").exists() and (runs / "mix").exists()


def test_a_failed_expert_stops_its_branch_alone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["math", "code", "until=mix", "experts.math.set.fill=true"]
    with pytest.raises(BtxError, match=r"expert-math: failed with status 1: .*quota is full.*not finished either: mix"):
        submit(words, runs=runs)
    assert (runs / "expert-code" / "DONE").exists() and not (runs / "mix").exists()
    with pytest.raises(BtxError, match="expert-math: failed"):
        submit(words, runs=runs, allow_missing=True)
    mix = json.loads((runs / "mix" / "manifest.json").read_text())
    assert mix["missing"] == "[math]" and "experts.math" not in mix
    (runs / "room").touch()
    submit(words, runs=runs)
    assert "experts.math" in json.loads((runs / "mix" / "manifest.json").read_text())


def test_a_real_mix_names_in_its_manifest_what_is_missing(tmp_path: Path, commands: CommandServer) -> None:
    config = make_models(tmp_path, "math")
    for missing in ([], ["prose", "law"]):
        out = tmp_path / f"mix{len(missing)}"
        arguments = [word for word in mix_arguments(config) if not word.startswith(("out=", "missing="))]
        ended = commands.run(*arguments, f"out={out}", f"missing=[{','.join(missing)}]")
        assert ended.code == 0, ended.err
        assert json.loads((out / "manifest.json").read_text())["missing"] == missing


def start_submit(runs: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "btx_nemo", "submit", "--local", "--runs", str(runs), *words]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_submit_saves_and_the_same_command_goes_on(runs: Path, number: signal.Signals) -> None:
    words = ("math", "until=experts", "expert.set.steps=60")
    process = start_submit(runs, *words)
    until((runs / "expert-math" / "latest").exists)
    with pytest.raises(UserError, match="another btx-nemo submit is at work"):
        submit(list(words), runs=runs)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == Stopped.exit_code
    assert "expert-math: stopped with a checkpoint saved; the same command resumes" in stderr
    submit(list(words), runs=runs)
    first, second = (json.loads(s) for s in (runs / "expert-math" / "starts.jsonl").read_text().splitlines())
    assert first["stop"] == [signal.SIGTERM] and second["first"] > 0


def test_cancel_stops_what_runs_here(runs: Path, commands: CommandServer) -> None:
    process = start_submit(runs, "math", "until=mix", "expert.set.steps=4000")
    until((runs / "expert-math" / "latest").exists)
    table = commands.run("status", "--runs", runs).out.splitlines()
    assert table[1].split()[:3] == ["expert-math", "running", "local"] and table[2].split()[:2] == ["mix", "waiting"]
    assert commands.run("cancel", "--runs", runs).out == "expert-math: asked to save and end\n"
    assert process.wait(timeout=60) == Stopped.exit_code
    assert commands.run("cancel", "--runs", runs).out == "nothing to cancel: no job is running or waiting\n"
    assert commands.run("status", "--runs", runs).out.splitlines()[1].split()[1] == "stopped"


def test_cancel_of_everything_starts_nothing_more(runs: Path, commands: CommandServer) -> None:
    process = start_submit(runs, "math", "code", "until=mix", "expert.set.steps=4000")
    until((runs / "expert-math" / "latest").exists)
    commands.run("cancel", "--runs", runs)
    assert process.wait(timeout=60) == Stopped.exit_code
    assert not (runs / "expert-code").exists() and not (runs / "state" / "local.json").exists()


def test_a_sigkill_of_submit_leaves_no_rank_behind(
    runs: Path, world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun and its ranks, under the script, under submit: each hears of the death above it, and the ranks save."""
    monkeypatch.delenv("BTX_CLI")
    for name, value in {"BTX_NPROC": "2", "BTX_SEED": str(world.dense), "BTX_DATA": str(world.data)}.items():
        monkeypatch.setenv(name, value)
    small = ("data.seq_length=32", "steps=4000", "micro_batch_size=1", "global_batch_size=4", "eval_batches=1")
    words = [f"expert.set.{setting}" for setting in (*small, "log_every=1")]
    out = runs / "expert-math"
    process = start_submit(runs, "math", "until=experts", "expert.config=tiny_expert", *words)

    def trainings() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [one for one in found if any(str(out) in word for word in one.info["cmdline"] or [])]

    wait_until(lambda: logged_step(out) >= 2, timeout=240)
    assert len(trainings()) == 3, "torchrun and two ranks"
    process.kill()
    process.wait()
    wait_until(lambda: not trainings(), timeout=60)
    assert (out / "latest").exists()


def test_settings_of_the_export_arrive_at_the_command(
    tmp_path: Path, commands: CommandServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    folder = make_llama(tmp_path / "hf", **SMALL)
    import_hf(folder, runs / "joint" / "checkpoints" / "step_00000001")
    (runs / "joint" / "latest").write_text("step_00000001\n")
    for done in ("joint", "expert-math"):
        (runs / done).mkdir(exist_ok=True)
        (runs / done / "DONE").touch()
    (runs / "mix").mkdir()
    command = ("submit", "math", "--local", "--runs", runs, "until=export")
    ended = commands.run(*command, "export.set.dtype=fp7")
    assert ended.code == 2 and "dtype=fp7: unknown; known: float32" in ended.err
    ended = commands.run(*command, "export.set.dtype=bfloat16", "export.set.shard_size=20000")
    assert ended.code == 0, ended.err
    exported = load_folder(runs / "export")
    assert {str(tensor.dtype) for tensor in exported.values()} == {"torch.bfloat16"}
    assert same_bits(exported, {name: tensor.bfloat16() for name, tensor in load_folder(folder).items()})
    assert len(list((runs / "export").glob("*.safetensors"))) > 1


def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> Path:
    """Programs on PATH, each a shell script; they may write into the file that is returned."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name, text in {"squeue": "", **programs}.items():
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"{calls}"\n{text}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "absent", lambda: "")
    return calls


def test_a_refused_submission_leaves_nothing_in_the_queue(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = f'case "$*" in *btx-mix*) echo "no such QOS" >&2; exit 1;; esac\ngrep -c . "{tmp_path}/calls"'
    calls = stubs(tmp_path, monkeypatch, sbatch=refuse, scancel="")
    with pytest.raises(UserError, match="sbatch refused btx-mix: no such QOS; nothing stays submitted"):
        submit(["math", "code", "experts.code.nodes=2"], runs=runs)
    lines = calls.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["squeue"] + ["sbatch"] * 3 + ["squeue", "scancel"]
    assert "--dependency=afterok:2:3 --kill-on-invalid-dep=yes" in lines[3]
    assert lines[5] == "scancel 2 3"
    assert not list(runs.glob("state/*.job.json"))


def test_a_job_s_own_environment_is_not_passed_on(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM_* of the job that submits would be taken for settings of the new one, and others hide jobs."""
    stubs(tmp_path, monkeypatch, sbatch=f'env >"{tmp_path}/env"; echo 7')
    hidden = ("SLURM_JOB_ID", "SQUEUE_PARTITION", "SCANCEL_STATE", "SCONTROL_ALL", "SINFO_FORMAT")
    for name in hidden:
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/x")
    submit(["math", "until=experts", "max_restarts=3", "requeue_on_failure=true"], runs=runs)
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert not {*hidden} & seen.keys() and seen["SLURM_CONF"] == "/etc/x"
    assert (seen["BTX_RUNS"], seen["BTX_MAX_RESTARTS"], seen["BTX_REQUEUE_ON_FAILURE"]) == (str(runs), "3", "1")


@pytest.mark.parametrize(("status", "expected"), [(0, True), (1, False)])
def test_a_client_without_configuration_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, expected: bool
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nexit {status}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.has_slurm() is expected
