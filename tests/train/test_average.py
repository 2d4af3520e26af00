"""The average of the weights (EMA): what it is of, what it costs, that it survives, and how it comes out."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing.average_jobs import averages
from btx_testing.commands import CommandServer, ok
from btx_testing.pool import RankPool
from btx_testing.runs import TinyWorld, weights
from btx_testing.tensors import load_folder, same_bits
from btx_testing.train_jobs import losses

DECAY = 0.8


def naive(values: list[torch.Tensor]) -> torch.Tensor:
    """sum decay^(t - i) w_i / sum decay^(t - i) over the steps i = 1..t, in float64."""
    shares = [DECAY ** (len(values) - i) for i in range(1, len(values) + 1)]
    return sum(share * value.double() for share, value in zip(shares, values)) / sum(shares)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "layout", "count", "precision"),
    [
        pytest.param("dense", {}, 2, "fp32", id="dp2"),
        pytest.param("dense", {}, 2, "bf16", id="dp2-bf16"),
        pytest.param("mixture", {"tp": 2}, 2, "bf16", id="tp2-bf16"),
        pytest.param("dense", {"pp": 2}, 2, "fp32", id="pp2"),
        pytest.param("mixture", {"ep": 2}, 2, "bf16", id="ep2-bf16"),
        pytest.param("mixture", {"tp": 2, "ep": 2}, 4, "bf16", id="tp2-ep2-dp2-bf16"),
    ],
)
def test_it_is_that_of_a_naive_loop(
    ranks: RankPool, world: TinyWorld, kind: str, layout: dict[str, int], count: int, precision: str
) -> None:
    """Of the fp32 weights behind bf16 ones; what bf16 shows of them would have given another."""
    options = {"precision": precision, "ema": {"decay": DECAY}}
    found_by = ranks.run(averages, str(getattr(world, kind)), layout, options, 5, ranks=count)
    assert found_by[0]["found"]
    for facts in found_by:
        assert facts["ok"] == facts["moved"] == [True] * 5
        rounded = 0.0
        for number, (key, found) in enumerate(facts["found"]):
            steps = [step[number] for step in facts["trace"]]
            assert {name for name, _ in steps} == {key}
            values = [value for _, value in steps]
            torch.testing.assert_close(found.double(), naive(values), atol=3e-7, rtol=3e-7, msg=key)
            assert not torch.equal(found, values[-1])
            off = naive([value.bfloat16() for value in values]) - found.double()
            rounded = max(rounded, off.abs().max().item())
        assert rounded > 1e-4 or not facts["found"]
        assert sum(value.numel() for _, value in facts["found"]) == facts["writes"]


def test_it_changes_nothing_else(ranks: RankPool, world: TinyWorld) -> None:
    options = {"precision": "bf16"}
    with_it, without = (
        ranks.run(losses, str(world.mixture), {"ep": 2}, {**options, "ema": {"decay": decay}}, 3, ranks=2)
        for decay in (DECAY, 0.0)
    )
    assert with_it == without


@pytest.mark.parametrize(("precision", "layout"), [("fp32", {}), ("fp16", {"ep": 2})])
def test_a_skipped_step_does_not_move_it(
    ranks: RankPool, world: TinyWorld, precision: str, layout: dict[str, int]
) -> None:
    """An infinite gradient, or what a loss scale is there for: the average is that of the steps that were taken."""
    options = {"precision": precision, "ema": {"decay": DECAY}, "loss_scale": {"initial": 64.0, "hysteresis": 1}}
    if precision != "fp16":
        del options["loss_scale"]
    for facts in ranks.run(averages, str(world.mixture), layout, options, 5, (0, 3), ranks=2):
        assert facts["ok"] == facts["moved"] == [False, True, True, False, True]
        assert len(facts["trace"]) == 3
        for number, (_, found) in enumerate(facts["found"]):
            values = [step[number][1] for step in facts["trace"]]
            torch.testing.assert_close(found.double(), naive(values), atol=3e-7, rtol=3e-7)


def test_what_is_frozen_costs_nothing(ranks: RankPool, world: TinyWorld) -> None:
    """Two data-parallel ranks share what is there of the routers, and nothing else."""
    options = {"train": ["*.mlp.router.*"], "ema": {"decay": DECAY}}
    found = ranks.run(averages, str(world.mixture), {}, options, 2, ranks=2)
    router = 2 * 4 * 32  # layers x experts x hidden
    assert sum(facts["kept"] for facts in found) == router
    assert sorted(key for key, _ in found[0]["found"]) == [f"decoder.layers.{i}.mlp.router.weight" for i in (0, 1)]


RUN = {"ema__decay": DECAY, "steps": 4, "checkpoint__every": 1, "checkpoint__keep": 9}


@pytest.fixture(scope="module")
def averaged(world: TinyWorld, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture's run on two ranks, every step of it saved, the first of four experts frozen; read only."""
    out = tmp_path_factory.mktemp("averaged") / "run"
    for ended in commands.run_ranks(2, *arguments(world, out, layout__ep=2)):
        ok(ended)
    return out


def arguments(world: TinyWorld, out: Path, **options: Any) -> list[str]:
    return world.arguments("tiny_mix", out, **{**RUN, "freeze": "['*.local_experts.0.*']", **options})


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(tokens).logits


def test_the_export_is_the_average_by_hand(
    world: TinyWorld, commands: CommandServer, averaged: Path, tmp_path: Path
) -> None:
    """Of the checkpoints after each step; in transformers they have the logits of the export."""
    from safetensors.torch import save_file

    from btx_nemo.convert.to_hf import export_hf

    steps = sorted((averaged / "checkpoints").iterdir())
    assert len(steps) == 4
    for step in steps[:-1]:
        export_hf(step, tmp_path / step.name, verify="false")
    values = [load_folder(tmp_path / step.name) for step in steps[:-1]] + [load_folder(averaged / "hf")]
    found = load_folder(averaged / "hf-ema")
    assert set(found) == set(values[0])
    for name, value in found.items():
        torch.testing.assert_close(value.double(), naive([step[name] for step in values]), atol=3e-7, rtol=3e-7)
        assert torch.equal(value, values[-1][name]) == (".experts.0." in name), name

    (hand,) = Path(shutil.copytree(averaged / "hf", tmp_path / "hand")).glob("*.safetensors")
    save_file({name: naive([step[name] for step in values]).float() for name in found}, hand, {"format": "pt"})
    tokens = torch.randint(0, 288, (2, 16), generator=torch.Generator().manual_seed(1))
    by_hand, exported, last = (logits(folder, tokens) for folder in (hand.parent, averaged / "hf-ema", averaged / "hf"))
    torch.testing.assert_close(exported, by_hand, atol=1e-5, rtol=1e-5)
    assert (exported - last).abs().max() > 1e-3

    ended = ok(commands.run("export", f"in={averaged}", f"out={tmp_path / 'again'}", "--ema"))
    assert same_bits(load_folder(tmp_path / "again"), found)
    manifest = json.loads((tmp_path / "again" / "manifest.json").read_text())
    total = len(manifest["averages"])
    assert f"; {total} of {total} stored tensors are averages; verified: " in ended.out
    assert f"with optimizer state, averages of {total} tensors, finished" in ok(commands.run("inspect", averaged)).out
    half = ok(commands.run("export", f"in={averaged}", f"out={tmp_path / 'bf16'}", "ema=true", "dtype=bfloat16"))
    assert "stored tensors are averages" in half.out


def test_an_export_of_averages_is_loaded_in_their_dtype(
    world: TinyWorld, commands: CommandServer, tmp_path: Path
) -> None:
    """Also where most weights are frozen, and of 16 bits: transformers takes all in the one dtype of config.json."""
    options = {"precision": "bf16", "train": "['*final_layernorm*']", "ema__decay": DECAY, "steps": 3}
    ok(commands.run(*world.arguments("tiny_expert", tmp_path / "run", **options)))
    assert json.loads((tmp_path / "run" / "hf-ema" / "config.json").read_text())["dtype"] == "float32"
    assert {value.dtype for value in load_folder(tmp_path / "run" / "hf-ema").values()} == {torch.float32}


def test_killed_and_resumed_it_is_the_same(
    world: TinyWorld, commands: CommandServer, averaged: Path, tmp_path: Path
) -> None:
    """Gathered on the first data-parallel rank, or not."""
    out = tmp_path / "run"
    before, gathered = "btx_testing.death:at?btx_nemo.train.run:train_step:3", {"checkpoint__gather_on_first": True}
    killed = commands.start_ranks(2, *arguments(world, out, layout__ep=2, **gathered), before=before)
    assert {rank.wait().code for rank in killed} == {-signal.SIGKILL}
    for ended in commands.run_ranks(2, *arguments(world, out, layout__ep=2, **gathered)):
        ok(ended)
    assert weights(out) == weights(averaged)
    assert same_bits(load_folder(out / "hf-ema"), load_folder(averaged / "hf-ema"))


@pytest.mark.slow
def test_another_layout_goes_on_with_it(
    world: TinyWorld, commands: CommandServer, averaged: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(averaged, tmp_path / "run"))
    for step in (3, 4):
        shutil.rmtree(out / "checkpoints" / f"step_{step:08d}")
    (out / "latest").write_text("step_00000002\n")
    (out / "DONE").unlink()
    for ended in commands.run_ranks(2, *arguments(world, out, layout__tp=2)):
        ok(ended)
    expected = load_folder(averaged / "hf-ema")
    for name, value in load_folder(out / "hf-ema").items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_what_cannot_be_is_told_in_a_line(
    world: TinyWorld, commands: CommandServer, whole: Path, averaged: Path, tmp_path: Path
) -> None:
    """Turned on, turned off or changed while a run goes on; a decay that is none; averages that nobody kept."""
    for out, before, now in ((averaged, DECAY, 0.0), (averaged, DECAY, 0.9)):
        ended = commands.run(*arguments(world, out, ema__decay=now))
        assert ended.code == 2
        assert f"was started with ema.decay={before}, now ema.decay={now}" in ended.err
        assert ended.err.count("\n") == 1
    ended = commands.run(*world.arguments("tiny_expert", whole, ema__decay=0.9))
    assert ended.code == 2 and "was started with ema.decay=0.0, now ema.decay=0.9" in ended.err
    ended = commands.run(*world.arguments("tiny_expert", tmp_path / "run", ema__decay=1.0))
    assert ended.code == 2 and "ema.decay=1.0: must lie between 0 (off) and 1, without 1" in ended.err
    ended = commands.run("export", f"in={whole}", f"out={tmp_path / 'hf'}", "--ema")
    assert ended.code == 2 and "holds no averages of its weights" in ended.err and ended.err.count("\n") == 1
    assert not (tmp_path / "hf").exists()
