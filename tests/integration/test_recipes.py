"""Mixtures of every kind live on: trained by the command, exported, and transformers computes what Megatron does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import jobs
from btx_testing.commands import CommandServer
from btx_testing.models import make_llama, probe_tokens
from btx_testing.pool import RankPool
from btx_testing.runs import SIZES, VOCAB, TinyWorld, metrics
from btx_testing.text import byte_tokenizer

from btx_nemo.convert.logits import hf_logits
from btx_nemo.embed.run import embed_domains
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

TWO = ("math", "code")
KINDS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "divmoe": ("divmoe", TWO, {}),
    "nexus": ("nexus", TWO, {"embeddings": "embeddings"}),
    "nvidia_upcycling": ("nvidia_upcycling", (), {"expansion": 2, "granularity": 2}),
    "every second layer": ("sparse_upcycling", (), {"copies": 4}),
    "drop_upcycling": ("drop_upcycling", (), {"copies": 3}),
    "split": ("btx", TWO, {"variant": "split"}),
    "two_expert": ("two_expert", ("math",), {}),
}


@pytest.fixture(scope="module")
def models(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("seed", *TWO)):
        byte_tokenizer(make_llama(root / name, seed=number, **SIZES))
    embed_domains(root / "seed", {name: world.data / name for name in TWO}, root / "embeddings", count=4, length=32)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_is_trained_and_exported_with_equal_logits(
    world: TinyWorld, models: Path, ranks: RankPool, commands: CommandServer, tmp_path: Path, kind: str
) -> None:
    recipe, experts, options = KINDS[kind]
    options = {key: str(models / value) if key == "embeddings" else value for key, value in options.items()}
    mix, out = tmp_path / "mix", tmp_path / "run"
    run_mix(
        MixConfig(
            recipe=recipe,
            seed=str(models / "seed"),
            experts={name: str(models / name) for name in experts},
            out=str(mix),
            format="megatron",
            options=options,
        )
    )
    arguments = {"init_from": mix, "steps": 2, "checkpoint__every": 0, "optim__warmup_steps": 0, "optim__lr": 1e-3}
    ended = commands.run(*world.arguments("tiny_mix", out, **{**arguments, "export": "true"}))
    assert ended.code == 0, ended.err
    assert all(torch.isfinite(torch.tensor(record["loss"])) for record in metrics(out) if "loss" in record)
    tokens = probe_tokens(VOCAB, length=24)
    before = ranks.run(jobs.logits, str(mix), {"tp": 1, "pp": 1, "ep": 1}, tokens, ranks=1)[0]
    after = ranks.run(jobs.logits, str(out), {"tp": 1, "pp": 1, "ep": 1}, tokens, ranks=1)[0]
    assert float((after - before).abs().max()) > 1e-4, "it has learnt something"
    torch.testing.assert_close(hf_logits(out / "hf", tokens), after, atol=1e-4, rtol=0)
