"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# Two cores and several ranks: more threads only get in each other's way. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from btx_testing.commands import CommandServer
from btx_testing.pool import RankPool
from btx_testing.runs import TinyWorld, make_world

# A shell that runs the tests in the background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool of gloo ranks."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandServer]:
    """Runs the command line without its start-up time."""
    server = CommandServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """Data and models for tiny training runs; read only."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone, unless there is one."""
    import torch

    if torch.distributed.is_initialized():
        yield
        return
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
