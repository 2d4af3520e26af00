"""Trained in Megatron, exported, loaded in transformers: the same logits and the same words, for every router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.hf_moe import FAMILIES, make_model, megatron_continues, pairs
from btx_testing.mixes import SPECIALISTS, Mixes
from btx_testing.pool import RankPool
from btx_testing.runs import VOCAB, TinyWorld
from btx_testing.tensors import load_folder, same_bits
from transformers import AutoModelForCausalLM

import btx_nemo
from btx_nemo.checkpoints.manifest import read_manifest
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.convert.verify import verify
from btx_nemo.families.architecture import read_config
from btx_nemo.families.source import find_checkpoint, read_model_json

NATIVE = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe", "olmo2": "flex_olmo"}
"""Family -> the architecture of its mixture with gates that sum to one; ours for the others."""
SHARES = {**NATIVE, "llama": "qwen2_moe", "mistral": "qwen2_moe"}
"""The same for shares of the full softmax."""
BESIDE = dict.fromkeys(("llama", "mistral", "qwen2"), "qwen2_moe")
"""The same beside a shared expert."""
OURS: dict[str, str] = {}
LAST = {"moe__options__allow_non_causal": "true", "router__losses__btx": 0.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "top_k": ("btx", {}, {}, NATIVE),
    "shares": ("btx", {}, {"moe__options__softmax": "before", "moe__options__renormalise": "false"}, SHARES),
    "soft": ("btx", {}, {"moe__router": "soft"}, NATIVE),
    "switch": ("btx", {}, {"moe__router": "switch", "moe__options__capacity_factor": 0.0}, SHARES),
    "switch-capacity": ("btx", {}, {"moe__router": "switch", "moe__options__capacity_factor": 1.0}, OURS),
    "sample_top1": ("btx", {}, {"moe__router": "sample_top1"}, OURS),
    "noisy_top_k": ("btx", {}, {"moe__router": "noisy_top_k", "router__losses__load": 0.1}, OURS),
    "expert_choice": ("btx", {}, {"moe__router": "expert_choice", **LAST}, OURS),
    "divmoe": ("divmoe", {}, {}, OURS),
    "nexus": ("nexus", {}, {}, BESIDE),
    "flexolmo": ("flexolmo", {}, {}, SHARES),
    "flexolmo-bias": ("flexolmo", {"keep_bias": True}, {}, OURS),
    "bar": ("bar", {}, {}, SHARES),
}
"""Router -> recipe, its options, settings of the training, and the architectures that it leaves in, by family."""
SLOW = {"bar"}


@pytest.fixture(scope="module")
def mixes(tmp_path_factory: pytest.TempPathFactory) -> Mixes:
    return Mixes(tmp_path_factory.mktemp("mixes"))


def train(world: TinyWorld, commands: CommandServer, start: Path, out: Path, **more: Any) -> None:
    """Three steps."""
    fixed = {"init_from": start, "steps": 3, "checkpoint__every": 0, "optim__warmup_steps": 0, "optim__lr": 1e-3}
    ended = commands.run(*world.arguments("tiny_mix", out, **{**fixed, **more}))
    assert ended.code == 0, ended.err


def holds_in_transformers(run: Path, ranks: RankPool, **generation: Any) -> None:
    """Logits and 32 words of the run's export are those of Megatron."""
    prompt = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    ((words, logits),) = ranks.run(megatron_continues, str(run), prompt, 32, ranks=1)
    btx_nemo.register_auto_classes()
    model = AutoModelForCausalLM.from_pretrained(run / "hf", attn_implementation="eager").eval()
    assert type(model).__module__.startswith(("btx_nemo.", "transformers."))  # not the code in the folder
    with torch.no_grad():
        torch.testing.assert_close(model(words).logits, logits, atol=1e-4, rtol=0)
    model.generation_config.eos_token_id = None
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 32, "do_sample": False, **generation}
    assert torch.equal(model.generate(prompt, **given), words)


@pytest.mark.parametrize(("case", "family"), pairs(CASES, SPECIALISTS, SLOW))
def test_mixed_trained_and_exported_it_is_what_megatron_computes(
    world: TinyWorld, commands: CommandServer, ranks: RankPool, mixes: Mixes, tmp_path: Path, case: str, family: str
) -> None:
    recipe, options, settings, targets = CASES[case]
    run, hf = tmp_path / "run", tmp_path / "run" / "hf"
    train(world, commands, mixes.mix(family, recipe, **options), run, **settings)
    manifest, target = read_manifest(hf), targets.get(family, "btx_moe")
    assert manifest["architecture"] == target, manifest["chosen"]
    assert manifest["chosen"].startswith(f"{target}, which computes what the model does")
    written, trained = read_config(hf), read_model_json(find_checkpoint(run))  # type: ignore[arg-type]
    simpler = target != "btx_moe" and case in ("nexus", "flexolmo", "bar")
    assert ("trains on" in manifest["chosen"]) == simpler, manifest["chosen"]
    if simpler:  # than what was trained, and comes back so
        assert written.moe and trained.moe and trained.moe.router in ("nexus", "flexolmo")
        assert (written.moe.router, written.moe.experts) == ("top_k", trained.moe.experts)
    else:
        assert target != "btx_moe" or written == trained
    # A capacity counts the tokens of a pass.
    holds_in_transformers(run, ranks, **({"use_cache": False} if case == "switch-capacity" else {}))
    import_hf(hf, tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "back")
    assert same_bits(load_folder(hf), load_folder(tmp_path / "back"))
    assert json.loads((hf / "config.json").read_text()) == json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("router", ["top_k", "divmoe"])
def test_a_family_of_mixtures_alone_trains_and_leaves_as_well(
    world: TinyWorld, commands: CommandServer, ranks: RankPool, tmp_path: Path, router: str
) -> None:
    """OLMoE has no dense models to mix."""
    make_model(seed=2, **{**FAMILIES["olmoe"], "vocab_size": VOCAB}).save_pretrained(tmp_path / "start")
    groups = {"moe__router": "divmoe", "moe__options__groups": 2} if router == "divmoe" else {}
    train(world, commands, tmp_path / "start", tmp_path / "run", **groups)
    expected = "btx_moe" if groups else "olmoe"
    assert read_manifest(tmp_path / "run" / "hf")["architecture"] == expected
    holds_in_transformers(tmp_path / "run", ranks)


def test_nexus_leaves_frozen_or_as_it_is(
    world: TinyWorld, commands: CommandServer, mixes: Mixes, tmp_path: Path
) -> None:
    """By default a fixed router of transformers' own; `target=btx_moe` keeps what trains; bf16 would round it."""
    run = tmp_path / "run"
    train(world, commands, mixes.mix("llama", "nexus"), run, export="false")

    def export(name: str, *more: str) -> str:
        ended = commands.run("export", f"in={run}", f"out={tmp_path / name}", *more)
        assert ended.code == 0, ended.err
        return ended.out

    line = export("frozen")
    assert "qwen2_moe, which computes what the model does; mixtral has no place for" in line
    assert "trains on as one, not as Nexus" in line and "target=btx_moe keeps what trains" in line
    assert "tensors read back equal; logits on the probe differ by at most" in line
    assert "btx_moe, which computes what the model does" in export("whole", "target=btx_moe")
    narrow = export("narrow", "dtype=bfloat16")
    assert "btx_moe, which" in narrow and "qwen2_moe would round the projected router to bfloat16" in narrow
    ended = commands.run("export", f"in={run}", f"out={tmp_path / 'no'}", "dtype=bfloat16", "target=qwen2_moe")
    assert ended.code == 2 and "would round the projected router" in ended.err
    assert "although" in export("rounded", "dtype=bfloat16", "target=qwen2_moe", "allow_inexact=true")
    settings = json.loads((tmp_path / "frozen" / "config.json").read_text())
    stated = {key: settings[key] for key in ("qkv_bias", "norm_topk_prob", "num_experts_per_tok")}
    assert stated == {"qkv_bias": False, "norm_topk_prob": False, "num_experts_per_tok": 1}
    verify(run, tmp_path / "frozen")
    verify(tmp_path / "frozen", tmp_path / "whole")


def test_a_bf16_run_keeps_its_router_in_fp32(
    world: TinyWorld, commands: CommandServer, mixes: Mixes, tmp_path: Path
) -> None:
    run, hf = tmp_path / "run", tmp_path / "run" / "hf"
    train(world, commands, mixes.mix("llama", "nexus"), run, precision="bf16")
    btx_nemo.register_auto_classes()
    ended = commands.run("export", f"in={run}", f"out={tmp_path / 'cast'}", "dtype=bfloat16")
    assert ended.code == 0 and "cast: btx_moe, which computes what the model does; mixtral" in ended.out, ended.err
    for folder in (hf, tmp_path / "cast"):
        wide = {name.rsplit(".", 1)[-1] for name, value in load_folder(folder).items() if value.dtype == torch.float32}
        assert {"w1", "w2", "domain_embeddings"} <= wide
    assert wide == {"w1", "w2", "domain_embeddings"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cast", dtype=torch.bfloat16)
    state = {name: value.dtype for name, value in model.state_dict().items()}
    assert {dtype for name, dtype in state.items() if ".gate." in name} == {torch.float32}
    assert {dtype for name, dtype in state.items() if ".gate." not in name} == {torch.bfloat16}
    verify(run, hf)


def test_routers_that_draw_are_compared_with_nothing_left_to_chance(
    world: TinyWorld, commands: CommandServer, mixes: Mixes, tmp_path: Path
) -> None:
    more = {"moe__router": "sample_top1", "moe__options__inference": "hard", "export": "false", "steps": 1}
    train(world, commands, world.mixture, tmp_path / "run", **more)
    ended = commands.run("export", f"in={tmp_path / 'run'}", f"out={tmp_path / 'hf'}")
    assert ended.code == 0 and "(tolerance 0.0001), at inference=argmax" in ended.out, ended.err
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["router_options"] == {"inference": "hard"}
    verify(tmp_path / "run", tmp_path / "hf")


def test_a_target_is_taken_only_when_exact(
    world: TinyWorld, commands: CommandServer, mixes: Mixes, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(world, commands, world.mixture, run, moe__router="divmoe", moe__options__groups=2, export="false")
    where = (f"in={run}", f"out={tmp_path / 'hf'}", "target=mixtral")
    ended = commands.run("export", *where)
    assert ended.code == 2 and "mixtral cannot compute moe.router=divmoe with {'groups': 2}" in ended.err
    assert "allow_inexact=true" in ended.err and not (tmp_path / "hf").exists()
    ended = commands.run("export", *where, "allow_inexact=true")
    assert ended.code == 0 and "mixtral, as asked, although mixtral cannot compute moe.router=divmoe" in ended.out
    assert read_manifest(tmp_path / "hf")["architecture"] == "mixtral"
    for wrong in ("target=gpt2", "allow_inexact=1"):
        assert commands.run("export", f"in={run}", f"out={tmp_path / 'no'}", wrong).code == 2
