"""Every file of conf/ is dry-run: all that its command checks before it builds or writes, on tiny models and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from btx_testing.chats import chat_domain
from btx_testing.configs import PIPELINES, REQUIRED
from btx_testing.models import make_llama
from btx_testing.runs import SIZES, TinyWorld, copy_domain
from btx_testing.text import byte_tokenizer

from btx_nemo.cli import main
from btx_nemo.config.load import conf_dir, load
from btx_nemo.embed.run import embed_domains
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

TRAIN, MIX, SUBMIT = (
    sorted(path.stem for path in (conf_dir() / command).glob("[!_]*.yaml")) for command in ("train", "mix", "submit")
)
CHATS = ("sft", "bar_sft", "bar_router")
"""Stages on conversations; the others are shown text."""


@pytest.fixture(scope="module")
def models(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense models, a mixture of each kind that a stage or an operation starts from, and chats."""
    root = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("seed", "math", "code")):
        byte_tokenizer(make_llama(root / name, seed=number, **SIZES))
    embed_domains(root / "seed", {n: world.data / n for n in ("math", "code")}, root / "embeddings", count=4, length=16)
    chat_domain(root, "math", 40)
    two = {name: str(root / name) for name in ("math", "code")}
    one = {"math": str(root / "math")}
    for out, recipe, experts, options in (
        ("mixture", "btx", two, {}),
        ("nexus", "nexus", two, {"embeddings": str(root / "embeddings")}),
        ("pair", "two_expert", one, {}),
        ("bar", "bar", dict.fromkeys(("math", "code", "tool", "safety"), str(root / "pair")), {}),
    ):
        run_mix(
            MixConfig(recipe=recipe, seed=str(root / "seed"), experts=experts, out=str(root / out), options=options)
        )
    return root


def command(*arguments: object) -> int:
    """Exit code of a command, run here."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def source_of(models: Path, name: str, stage: str) -> Path:
    if "bar" in name or "flexolmo" in name:
        return models / ("bar" if stage == "router" else "pair")
    if "nexus" in name and stage == "mix":
        return models / "nexus"
    return models / ("seed" if stage in ("expert", "sft") else "mixture")


@pytest.mark.parametrize("name", TRAIN)
def test_every_training_run(
    world: TinyWorld, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    values: dict[str, Any] = load("train", name, REQUIRED.get(name, []))
    data = models / "data" if name.removeprefix("tiny_") in CHATS else world.data
    blend = values["data"]["blend"]
    if not {*blend} <= {"math", "code"}:  # the papers' sources, each in the place of one of ours
        data = tmp_path / "data"
        for domain in blend:
            copy_domain(world.data / "math", data / domain)
    overrides = [f"data.path={data}", "data.seq_length=32", f"out={tmp_path / 'run'}", "micro_batch_size=1"]
    if values["model"] is None:
        overrides.append(f"init_from={source_of(models, name, values['stage'])}")
    if values.get("tokens") is not None:  # of sequences this short, the papers' tokens are too many to count
        overrides.append("tokens=1e5")
    before = sorted(tmp_path.rglob("*"))
    small = [
        *overrides,
        "optim.offload=0.5",
        "optim.warmup_steps=0",
    ]  # the tiny data's epochs are shorter than a warm-up
    assert command("train", "--config-name", name, "--dry-run", *REQUIRED.get(name, []), *small) == 0
    printed = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
    assert printed.startswith(f"stage     {values['stage']}, from ")
    for section in ("trains", "frozen", "data", "length", "layout", "schedule", "out"):
        assert f"\n{section:9} " in printed, section
    assert "), 50% of it on the host, weight decay " in printed
    assert (printed.count("\nrouting ") == 1) == (values["stage"] in ("mix", "router", "bar_expert"))


@pytest.mark.parametrize("name", MIX)
def test_every_mix(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    seed = {"in": models / ("nexus" if name == "extend" else "bar" if name == "upgrade" else "mixture")}
    if not any(word.startswith("in=") for word in REQUIRED[name]):
        seed = {"seed": models / "seed"}
    settings: dict[str, Any] = {**seed, "out": tmp_path / "out"}
    if any(word.startswith("experts.") for word in REQUIRED[name]):
        domain = "law" if name in ("add", "extend") else "math"
        settings[f"experts.{domain}"] = models / ("pair" if name in ("bar", "flexolmo", "upgrade") else "math")
    if name in ("nexus", "extend"):
        settings["embeddings"] = models / "embeddings"
    if name == "extend":
        settings[f"experts.{domain}"], settings["embeddings"] = models / "math", law_embeddings(models, tmp_path)
    if name == "remove":
        settings["names"] = "[math]"
    code = command("mix", "--config-name", name, "--dry-run", *(f"{key}={value}" for key, value in settings.items()))
    told = capsys.readouterr()
    if name == "bam":
        assert code == 2 and "not supported" in told.err
        return
    assert code == 0, told.err
    assert told.out and not (tmp_path / "out").exists()


def law_embeddings(models: Path, tmp_path: Path) -> Path:
    """Embeddings of one domain more."""
    data = models / "data" / "math"
    embed_domains(models / "seed", {"law": data}, tmp_path / "law", count=4, length=16)
    return tmp_path / "law"


@pytest.mark.parametrize("name", SUBMIT)
def test_every_pipeline(
    world: TinyWorld,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    if "tiny" not in name:  # which makes its own seed and data
        monkeypatch.setenv("BTX_SEED", str(models / "seed"))
        monkeypatch.setenv("BTX_DATA", str(world.data))
    words = PIPELINES.get(name, [])
    assert command("submit", "--config-name", name, "--dry-run", "--runs", tmp_path / "runs", *words) == 0
    printed = capsys.readouterr().out
    assert "train_expert.sh" in printed and "mix.sh" in printed
