"""A part of the optimizer in the host's memory: Megatron's own, on a CPU that stands for the GPU and for its host."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing.commands import CommandServer, ok
from btx_testing.optimizer_jobs import trained
from btx_testing.pool import RankPool
from btx_testing.runs import TinyWorld, weights
from btx_testing.tensors import load_folder, same_bits

ROUNDING = {"fp32": 2e-6, "bf16": 4e-4, "fp16": 4e-4}
"""Of a weight that moved by up to 4e-2: torch's fused AdamW, which works on the host, against its plain one; in 16 bits
that can round a weight of the model the other way, and then gradients are others."""


SCALED = {"loss_scale": {"initial": 64.0}}
FROZEN_ROWS = {"router": {"frozen_rows": [0, 2]}, "decay_routers": True, "weight_decay": 0.5}


@pytest.mark.parametrize(
    ("layout", "count", "options"),
    [
        pytest.param({"ep": 2}, 2, {"precision": "bf16", "offload": 0.5}, id="ep2-bf16-half"),
        pytest.param({"ep": 2}, 2, {"precision": "bf16", "offload": 1.0}, id="ep2-bf16-all"),
        pytest.param({}, 2, {"precision": "fp32", "offload": 0.3}, id="dp2-fp32-third"),
        pytest.param({"tp": 2}, 2, {"precision": "fp16", "offload": 0.6, **SCALED}, id="tp2-fp16"),
        pytest.param({}, 1, {"offload": 1.0, "train": ["*.mlp.router.*"]}, id="routers"),
        pytest.param({}, 1, {"offload": 1.0, **FROZEN_ROWS}, id="rows"),
        pytest.param({"ep": 2}, 2, {"offload": 1.0, **FROZEN_ROWS}, id="ep2-rows"),
    ],
)
def test_it_trains_as_without(
    ranks: RankPool, world: TinyWorld, layout: dict[str, int], count: int, options: dict[str, Any]
) -> None:
    """Main weights, moments and model after four steps, of bf16 experts and fp32 routers, wherever each is."""
    plain = ranks.run(trained, str(world.mixture), layout, {"lr": 1e-2, **options, "offload": 0.0}, 4, ranks=count)
    found = ranks.run(trained, str(world.mixture), layout, {"lr": 1e-2, **options}, 4, ranks=count)
    atol = ROUNDING[options.get("precision", "fp32")]
    for mine, expected in zip(found, plain, strict=True):
        assert mine["state"].keys() == expected["state"].keys()
        for name, value in mine["state"].items():
            torch.testing.assert_close(value, expected["state"][name], atol=atol, rtol=0, msg=name)
        for name, value in mine["parameters"].items():
            near = {"atol": atol, "rtol": 0.0 if value.dtype == torch.float32 else 2**-7}
            torch.testing.assert_close(value, expected["parameters"][name], msg=name, **near)
        assert expected["on_host"] == 0
        least = options["offload"] * mine["total"]
        assert least <= mine["on_host"] <= min(least + 2 * 288 * 32, mine["total"])  # by whole parameters


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """To the bit, with an average beside it, whose fp32 weights are on both; another fraction goes on, to rounding."""
    options = {"layout__ep": 2, "precision": "bf16", "optim__offload": 0.5, "ema__decay": 0.9, "steps": 6}
    whole, out = tmp_path / "whole", tmp_path / "run"
    for ended in commands.run_ranks(2, *world.arguments("tiny_mix", whole, **options)):
        ok(ended)
    arguments = world.arguments("tiny_mix", out, **options)
    killed = commands.start_ranks(2, *arguments, before="btx_testing.death:at?btx_nemo.train.run:train_step:6")
    assert {rank.wait().code for rank in killed} == {-signal.SIGKILL}
    other = Path(shutil.copytree(out, tmp_path / "other"))
    for ended in commands.run_ranks(2, *arguments):
        ok(ended)
    assert weights(out) == weights(whole)
    assert same_bits(load_folder(out / "hf-ema"), load_folder(whole / "hf-ema"))
    ok(commands.run(*world.arguments("tiny_mix", other, **{**options, "layout__ep": 1, "optim__offload": 0.0})))
    expected = load_folder(whole / "hf-ema")
    for name, value in load_folder(other / "hf-ema").items():
        torch.testing.assert_close(value, expected[name], atol=4e-4, rtol=0, msg=name)


def test_a_fraction_that_is_none(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    ended = commands.run(*world.arguments("tiny_mix", tmp_path / "run", optim__offload=1.5))
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "optim.offload=1.5: must be a fraction between 0 and 1" in ended.err
