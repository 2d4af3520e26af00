"""A real Slurm of two virtual nodes for all tests of this folder, and a user of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from btx_testing.slurm import INSTALL, MISSING, TOOL, User, plain_environment, with_stand_in

ROOM = "256k"
"""Size of the file system that is too small for a checkpoint."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """Folder of a throw-away cluster; a short path, because unix sockets lie below it.

    It goes when this process goes, however that ends.
    """
    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)}: {INSTALL}")
    folder = Path(tempfile.mkdtemp(prefix="btx_slurm_", dir="/tmp"))
    # Mounted before the nodes get mount namespaces of their own, so that they see it too.
    small = folder / "small" / "expert-math"
    small.mkdir(parents=True)
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", str(small)], capture_output=True
    ).returncode
    if not mounted:
        shutil.rmtree(folder / "small")
    started = subprocess.run(
        [str(TOOL), "start", str(folder), str(os.getpid())],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    try:
        assert started.returncode == 0, started.stderr
        yield folder
    finally:
        subprocess.run([str(TOOL), "stop", str(folder)], env=plain_environment(), timeout=120)
        if mounted:
            subprocess.run(["umount", str(small)], check=True)
        shutil.rmtree(folder)


@pytest.fixture
def user(cluster: Path, tmp_path: Path) -> User:
    """One with a stand-in for the command."""
    return with_stand_in(cluster, tmp_path)
