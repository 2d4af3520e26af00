"""Trained in Megatron, exported, loaded in transformers: the same logits and the same words, for every router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.hf_moe import FAMILIES, make_model, megatron_continues, pairs
from btx_testing.pool import RankPool
from btx_testing.runs import VOCAB, TinyWorld
from btx_testing.tensors import load_folder, same_bits
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import btx_nemo
from btx_nemo.checkpoints.manifest import read_manifest
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.convert.verify import verify
from btx_nemo.families.architecture import read_config
from btx_nemo.families.source import find_checkpoint, read_model_json

ROUTERS: dict[str, dict[str, Any]] = {
    "top_k": {"moe__options__softmax": "before", "moe__options__renormalise": "false"},
    "switch": {"moe__options__capacity_factor": 1.0},
    "soft": {},
    "sample_top1": {},
    "noisy_top_k": {"router__losses__load": 0.1},
    "divmoe": {"moe__options__groups": 2},
    "nexus": {"moe__options__embedding_size": 6, "moe__shared_expert_intermediate_size": 40},
    "flexolmo": {"moe__options__bias": "true", "router__reset": "true"},
    "expert_choice": {"moe__options__allow_non_causal": "true", "router__losses__btx": 0.0},
}


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("domains")
    embeddings = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    save_file({"domain_embeddings": embeddings}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A mixture of each family, in our own architecture."""
    root = tmp_path_factory.mktemp("mixtures")
    for family, settings in FAMILIES.items():
        make_model(seed=2, **{**settings, "vocab_size": VOCAB}).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


def train(
    world: TinyWorld, commands: CommandServer, domains: Path, start: Path, out: Path, router: str, **more: Any
) -> None:
    """Three steps with a router."""
    options = {"moe__router": router, **ROUTERS[router], **more}
    if router == "nexus":
        options["moe__options__embeddings"] = domains
    fixed = {"init_from": start, "steps": 3, "checkpoint__every": 0, "optim__warmup_steps": 0, "optim__lr": 1e-3}
    ended = commands.run(*world.arguments("tiny_mix", out, **{**fixed, **options}))
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(("router", "family"), pairs(ROUTERS, FAMILIES))
def test_what_megatron_trained_is_what_transformers_computes(
    world: TinyWorld, commands: CommandServer, ranks: RankPool, domains: Path, mixtures: dict[str, Path],
    tmp_path: Path, router: str, family: str,
) -> None:  # fmt: skip
    run, hf = tmp_path / "run", tmp_path / "run" / "hf"
    train(world, commands, domains, mixtures[family], run, router)  # which exports in the architecture it came from
    chosen = read_manifest(hf)["chosen"]
    assert (
        chosen.startswith("btx_moe, which computes what the model does")
        and read_manifest(hf)["architecture"] == "btx_moe"
    )
    assert read_config(hf) == read_model_json(find_checkpoint(run))  # type: ignore[arg-type]
    prompt = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    ((words, logits),) = ranks.run(megatron_continues, str(run), prompt, 32, ranks=1)
    btx_nemo.register_auto_classes()
    model = AutoModelForCausalLM.from_pretrained(hf, attn_implementation="eager").eval()
    assert type(model).__module__.startswith("btx_nemo.")  # not the code in the folder
    with torch.no_grad():
        torch.testing.assert_close(model(words).logits, logits, atol=1e-4, rtol=0)
    model.generation_config.eos_token_id = None
    cache = {"use_cache": False} if router == "switch" else {}  # its capacity counts the tokens of a pass
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False, **cache)
    assert torch.equal(found, words)
    import_hf(hf, tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "back")
    assert same_bits(load_folder(hf), load_folder(tmp_path / "back"))
    assert json.loads((hf / "config.json").read_text()) == json.loads((tmp_path / "back" / "config.json").read_text())


def test_a_bf16_run_keeps_its_router_in_fp32(
    world: TinyWorld, commands: CommandServer, domains: Path, tmp_path: Path
) -> None:
    run, hf = tmp_path / "run", tmp_path / "run" / "hf"
    train(world, commands, domains, world.mixture, run, "nexus", precision="bf16")
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


def test_routers_that_draw_are_not_held_to_their_logits(
    world: TinyWorld, commands: CommandServer, domains: Path, tmp_path: Path
) -> None:
    more = {"moe__options__inference": "hard", "export": "false", "steps": 1}
    train(world, commands, domains, world.mixture, tmp_path / "run", "sample_top1", **more)
    for inference, said in (("hard", "logits not compared, since the routers draw"), ("argmax", "differ by at most")):
        model = find_checkpoint(tmp_path / "run") / "model.json"  # type: ignore[operator]
        model.write_text(model.read_text().replace('"hard"', f'"{inference}"'))
        ended = commands.run("export", f"in={tmp_path / 'run'}", f"out={tmp_path / inference}")
        assert ended.code == 0 and said in ended.out, ended.err


def test_a_target_is_taken_only_when_exact(
    world: TinyWorld, commands: CommandServer, domains: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(world, commands, domains, world.mixture, run, "divmoe", export="false")
    where = (f"in={run}", f"out={tmp_path / 'hf'}", "target=mixtral")
    ended = commands.run("export", *where)
    assert ended.code == 2 and "mixtral cannot compute moe.router=divmoe with {'groups': 2}" in ended.err
    assert "allow_inexact=true" in ended.err and not (tmp_path / "hf").exists()
    ended = commands.run("export", *where, "allow_inexact=true")
    assert ended.code == 0 and "mixtral, as asked, although mixtral cannot compute moe.router=divmoe" in ended.out
    assert read_manifest(tmp_path / "hf")["architecture"] == "mixtral"
    for wrong in ("target=gpt2", "allow_inexact=1"):
        assert commands.run("export", f"in={run}", f"out={tmp_path / 'no'}", wrong).code == 2
