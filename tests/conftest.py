"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Two cores and several ranks: more threads only get in each other's way. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from btx_testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool of gloo ranks."""
    pool = RankPool()
    yield pool
    pool.close()
