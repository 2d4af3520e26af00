"""Runs that nothing interrupted, for comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from btx_testing.commands import CommandServer
from btx_testing.runs import TinyWorld


@pytest.fixture(scope="session")
def whole(world: TinyWorld, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run of twelve steps; read only."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ended = commands.run(*world.arguments("tiny_expert", out))
    assert ended.code == 0, ended.err
    return out


@pytest.fixture(scope="session")
def whole_pair(world: TinyWorld, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture's run on two ranks, its experts spread over them; read only."""
    out = tmp_path_factory.mktemp("whole-pair") / "run"
    for ended in commands.run_ranks(2, *world.arguments("tiny_mix", out, layout__ep=2)):
        assert ended.code == 0, ended.err
    return out
