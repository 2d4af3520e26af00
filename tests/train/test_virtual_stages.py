"""A run in virtual pipeline stages is the run of one rank, and a checkpoint of either goes on as the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from btx_testing.commands import CommandServer
from btx_testing.models import make_mixtral
from btx_testing.runs import SIZES, TinyWorld, curve, weights

STOP = "btx_testing.death:term_at?btx_nemo.train.run:train_step:6"


def test_resharding_to_and_from_virtual_stages(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """Loss and validation loss of all twelve steps: weights and the optimizer's state."""
    model = make_mixtral(tmp_path / "model", seed=1, **{**SIZES, "num_hidden_layers": 4})
    stages = {"layout__pp": 2, "layout__vpp": 2}

    def arguments(out: str, **options: int) -> list[str]:
        return world.arguments("tiny_mix", tmp_path / out, init_from=model, **options)

    assert commands.run(*arguments("whole")).code == 0
    assert commands.run(*arguments("one"), before=STOP).code == 75
    assert [rank.wait().code for rank in commands.start_ranks(2, *arguments("two", **stages), before=STOP)] == [75, 75]
    assert [ended.code for ended in commands.run_ranks(2, *arguments("one", **stages))] == [0, 0]
    assert commands.run(*arguments("two")).code == 0
    for out in ("one", "two"):
        assert curve(tmp_path / out) == pytest.approx(curve(tmp_path / "whole"), abs=1e-4)
        assert len(weights(tmp_path / out)) == len(weights(tmp_path / "whole"))  # the export has every layer
