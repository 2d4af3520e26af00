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
