"""Whole runs with each router: state saved and resumed, what is written down, what is refused, what is warned of."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from btx_testing.commands import CommandServer
from btx_testing.runs import TinyWorld, curve, metrics
from safetensors.torch import save_file

from btx_nemo.checkpoints.torch_dist import DistReader
from btx_nemo.config.load import conf_dir

NEXUS = {
    "moe__router": "nexus",
    "moe__options__embedding_size": 6,
    "moe__shared_expert_intermediate_size": 40,
}
RUNS = {
    "sample_top1": {"moe__router": "sample_top1"},
    "noisy_top_k": {"moe__router": "noisy_top_k", "router__losses__load": 0.1, "router__input_jitter": 0.01},
    "nexus": NEXUS,
    "flexolmo": {"moe__router": "flexolmo", "moe__options__bias": "true", "router__reset": "true"},
    "switch-bf16": {
        "moe__router": "switch",
        "precision": "bf16",
        "dropout__expert": 0.4,
        "dropout__hidden": 0.1,
        "per_token_loss": "true",
    },
}


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("domains")
    embeddings = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    save_file({"domain_embeddings": embeddings}, folder / "model.safetensors")
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    reader = DistReader(folder)
    return {
        name: reader.read(name, [slice(0, size) for size in info.shape]).clone()
        for name, info in reader.layout().items()
        if not name.startswith(("optimizer", "scheduler", "progress"))
    }


def arguments(world: TinyWorld, domains: Path, name: str, out: Path) -> list[str]:
    more = {"moe__options__embeddings": domains} if name == "nexus" else {}
    return world.arguments(
        "tiny_mix",
        out,
        **{**RUNS[name], **more, "export": "false", "steps": 6, "checkpoint__every": 3},
        checkpoint__keep=9,
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_run(
    world: TinyWorld, commands: CommandServer, domains: Path, tmp_path: Path, name: str
) -> None:
    out, last = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000006"
    command = arguments(world, domains, name, out)
    assert commands.run(*command).code == 0
    whole, lines = stored(last), metrics(out)
    router = {key: value for key, value in whole.items() if ".mlp.router." in key}
    assert router and all(value.dtype == torch.float32 for value in router.values())
    shutil.rmtree(last)
    (out / "latest").write_text("step_00000003\n")
    (out / "DONE").unlink()
    ended = commands.run(*command)
    assert ended.code == 0, ended.err
    again = stored(last)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[key], whole[key]) for key in whole)
    assert metrics(out) == lines
    # The checkpoint knows its router: a further run needs no word of it.
    more = {"init_from": out, "export": "false", "steps": 1, "checkpoint__every": 0, "optim__warmup_steps": 0}
    ended = commands.run(*world.arguments("tiny_mix", tmp_path / "more", **more))
    assert ended.code == 0, ended.err
    ended = commands.run("export", f"in={out}", f"out={tmp_path / 'hf'}")
    target = "qwen2_moe" if name in ("nexus", "switch") else "btx_moe"
    assert ended.code == 0 and f"{target}, which computes what the model does; mixtral" in ended.out, ended.err
    assert "logits on the probe differ by at most" in ended.out
    if name == "nexus":
        embeddings = again["decoder.layers.1.mlp.router.domain_embeddings"]
        assert torch.equal(embeddings, torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))
    if name == "flexolmo":
        penalty = torch.stack([again[f"decoder.layers.{i}.mlp.router.penalty"] for i in range(2)])
        assert (penalty <= 0).all() and (penalty < 0).any()


@pytest.mark.parametrize("name", ["sample_top1", "noisy_top_k", "nexus", "flexolmo"])
def test_router_state_is_resharded(
    world: TinyWorld, commands: CommandServer, domains: Path, tmp_path: Path, name: str
) -> None:
    """Saved at tp2 pp2 ep2, resumed at one rank and at another layout: the run of one rank."""
    assert commands.run(*arguments(world, domains, name, tmp_path / "whole")).code == 0
    expected = stored(tmp_path / "whole" / "checkpoints" / "step_00000006")
    out = tmp_path / "spread"
    spread = [*arguments(world, domains, name, out), "layout.tp=2", "layout.pp=2", "layout.ep=2"]
    before = "btx_testing.death:term_at?btx_nemo.train.run:train_step:3"
    assert [rank.wait().code for rank in commands.start_ranks(4, *spread, before=before)] == [75] * 4
    for layout, count in (([], 1), (["layout.ep=2"], 2)):
        again = Path(shutil.copytree(out, tmp_path / f"again{count}"))
        for ended in commands.run_ranks(count, *arguments(world, domains, name, again), *layout):
            assert ended.code == 0, ended.err
        assert curve(again) == pytest.approx(curve(tmp_path / "whole"), abs=1e-4)
        found = stored(again / "checkpoints" / "step_00000006")
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], atol=2e-3 if value.is_floating_point() else 0, rtol=0)
        if name == "nexus":
            key = "decoder.layers.1.mlp.router.domain_embeddings"
            assert torch.equal(found[key], expected[key])


def test_a_public_expert_keeps_its_bits(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """By what docs/routers.md points to: BAR's training of an expert beside the public one; AdamW's decay is on."""
    stage = yaml.safe_load((conf_dir() / "train" / "bar_midtrain.yaml").read_text())
    rows, patterns = json.dumps(stage["router"]["frozen_rows"]), json.dumps(stage["train"])
    found = {}
    for steps in (0, 6):
        out = tmp_path / str(steps)
        more = {"moe__router": "flexolmo", "moe__options__bias": "true", "router__frozen_rows": rows, "train": patterns}
        arguments = world.arguments("tiny_mix", out, **more, export="false", steps=steps, optim__warmup_steps=0)
        ended = commands.run(*arguments)
        assert ended.code == 0, ended.err
        found[steps] = stored(out / "checkpoints" / f"step_{steps:08d}")
    before, after = found[0], found[6]
    assert before.keys() == after.keys()
    for key, value in before.items():
        if "penalty" in key:
            continue
        trained = {1} if ".experts.linear" in key else {1, 2, 3} if ".router.weight" in key else set()
        pairs = zip(after[key], value, strict=True) if trained else [(after[key], value)]
        assert {i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)} == trained, key


def test_metrics_hold_the_routing(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = {"moe__router": "switch", "moe__options__capacity_factor": 1.0, "export": "false", "steps": 2}
    assert commands.run(*world.arguments("tiny_mix", out, **more, optim__warmup_steps=0)).code == 0
    record = next(line for line in metrics(out) if "loss" in line)
    assert all(sum(layer) == pytest.approx(1) for layer in record["expert_load"])
    routing = record["routing"]
    assert routing.keys() == {"mean_gate", "entropy", "coactivation", "dropped", "logit_rms", "dead"}
    assert all(0 < share < 1 for share in routing["dropped"])  # a capacity of the fair share and uneven routing
    for layer in range(2):
        together = torch.tensor(routing["coactivation"][layer])
        torch.testing.assert_close(together.diagonal(), torch.tensor(record["expert_load"][layer]), atol=1e-6, rtol=0)
        assert together.sum().item() == pytest.approx(1)  # one expert a token: nothing off the diagonal
    assert len(record["router_losses"]["btx"]) == 2


def test_a_dead_expert_and_a_frozen_router_are_named(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    more = {"moe__top_k": 1, "moe__options__softmax": "before", "moe__options__renormalise": "false", "steps": 2}
    more |= {"freeze": "['*.router.*']", "export": "false", "optim__warmup_steps": 0, "data__seq_length": 2}
    ended = commands.run(
        *world.arguments("tiny_mix", tmp_path / "run", **more, global_batch_size=2, micro_batch_size=1)
    )
    assert ended.code == 0, ended.err
    assert "warning: the routers are frozen, so that router.losses={'btx': 0.01} move only" in ended.err
    assert "got no token in this step" in ended.err  # four tokens for four experts
    assert re.search(r"mix 2/2  loss .*  load [▁-█]{4} [▁-█]{4}  entropy \d+%  dead \d", ended.err)
