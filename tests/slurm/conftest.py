"""A real Slurm of two virtual nodes for all tests of this folder, and a user of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from btx_testing.pipeline import environment, make_place, start_here, words
from btx_testing.runs import TinyWorld
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


@pytest.fixture(scope="session")
def place(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the real pipeline starts from."""
    return make_place(world, tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def pipeline_here(
    place: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The real pipeline at work on this machine, without Slurm, and its runs."""
    runs = tmp_path_factory.mktemp("calm") / "runs"
    process = start_here(place, runs)
    yield process, runs
    process.terminate()
    process.wait(timeout=90)


@pytest.fixture(scope="session")
def pipeline_on_nodes(
    cluster: Path, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[User, dict[str, str]]:
    """The real pipeline in the queue, two ranks a job over two nodes; whose it is, and its jobs."""
    if not (cluster / "hosts").exists():
        pytest.skip("the nodes have no names of their own: unshare --mount --uts needs root")
    folder = tmp_path_factory.mktemp("nodes")
    extra = {"SLURM_CONF": str(cluster / "slurm.conf")}
    user = User(cluster, environment(place, folder / "runs", nodes=2) | extra, folder)
    return user, user.submit(*words(place), "until=export")


@pytest.fixture(scope="module", autouse=True)
def in_advance(request: pytest.FixtureRequest) -> None:
    """Starts the real pipelines before the first test of a module that has a use for idle processors.

    The tests with a stand-in come first, and wait for Slurm's clocks. A module names in `IN_ADVANCE` what may run
    beside its tests; it is started where a test of this session asks for it.
    """
    for name in getattr(request.module, "IN_ADVANCE", ()) if not MISSING else ():
        if any(name in item.fixturenames for item in request.session.items):  # type: ignore[attr-defined]
            with contextlib.suppress(pytest.skip.Exception):  # which is for the test that asks for it
                request.getfixturevalue(name)
