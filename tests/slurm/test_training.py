"""The real training, mix and export under a real Slurm, two ranks over two nodes: the same bits as without Slurm.

And after what happens to clusters.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from btx_testing.pipeline import EXPERTS, environment, words
from btx_testing.runs import weights
from btx_testing.slurm import User, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def calm(place: Path, pipeline_here: tuple[subprocess.Popen[bytes], Path]) -> Path:
    """The runs of the whole pipeline on this machine, without Slurm."""
    process, runs = pipeline_here
    assert process.wait(timeout=900) == 0, (place / "here.log").read_text()
    # What `eval` does after comparing logits, as an export does too.
    command = [sys.executable, "-m", "btx_nemo", "losses", str(runs), str(runs / "eval")]
    subprocess.run(command, env=environment(place, runs, nodes=1), check=True, timeout=90)
    losses = json.loads((runs / "eval" / "losses.json").read_text())
    assert set(losses) == {*EXPERTS, "joint"} and set(losses["joint"]) == {"math", "code", "prose"}
    return runs


def submit(user: User, *arguments: str) -> dict[str, str]:
    return user.submit(*words(Path(user.env["BTX_DATA"]).parent), *arguments)


def same_tensors(one: Path, other: Path) -> bool:
    """Whether the model files of two folders are the same, byte for byte."""
    names = sorted(path.name for path in one.glob("*.safetensors"))
    assert names
    return names == sorted(path.name for path in other.glob("*.safetensors")) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def assert_same(user: User, calm: Path, *stages: str) -> None:
    for stage in stages:
        if stage in ("mix", "export"):
            assert same_tensors(user.runs / stage, calm / stage), stage
        else:
            assert weights(user.runs / stage) == weights(calm / stage), stage


def end_rank(out: Path, rank: int) -> None:
    """SIGKILL to one rank of a training."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        ranks = f"out={out}" in words and "torch.distributed.run" not in words
        if ranks and process.environ().get("RANK") == str(rank):
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError(f"no rank {rank} of {out}")


def test_over_two_nodes_the_same_bits_as_on_this_machine(
    pipeline_on_nodes: tuple[User, dict[str, str]], calm: Path
) -> None:
    user, ids = pipeline_on_nodes
    assert user.wait_end(*ids.values(), seconds=900) == ["COMPLETED"] * len(ids), user.btx("status")
    assert_same(user, calm, *EXPERTS, "mix", "joint", "export")
    for stage in (*EXPERTS, "joint"):
        assert "2 node(s) x 1 rank(s)" in user.log(stage)
    assert set(submit(user, "until=export").values()) == {"done"}


@pytest.fixture
def little_room(cluster: Path) -> Iterator[Path]:
    """A runs folder where expert-math is a file system that is too small for a checkpoint."""
    runs = cluster / "small"
    if not runs.exists():
        pytest.skip("mounting a file system needs root")
    yield runs
    for path in runs.iterdir():
        if path.name != "expert-math":
            shutil.rmtree(path)


def test_after_faults_in_every_job_the_same_bits(
    pipeline_on_nodes: tuple[User, dict[str, str]], calm: Path, little_room: Path
) -> None:
    """A full disk, a stop before the limit, a dead rank, a requeue; then those of `joint`, below."""
    user = pipeline_on_nodes[0].having(BTX_RUNS=str(little_room))
    settings = ("requeue_on_failure=true", "max_restarts=1", "until=train")
    ids = submit(user, *settings)
    fault_each(
        user,
        {
            "expert-code": lambda: end_rank(user.runs / "expert-code", 1),
            "expert-prose": lambda: user.run("scontrol", "requeue", ids["expert-prose"]),
        },
    )
    ended = user.wait_end(*ids.values(), seconds=900)
    assert ended == ["FAILED", "COMPLETED", "COMPLETED", "CANCELLED", "CANCELLED"], user.btx("status")
    row = next(line for line in user.btx("status").splitlines() if line.startswith("expert-math"))
    assert row.split()[1] == "failed" and "the disk or a quota is full" in row
    user.run("mount", "-o", "remount,size=64m", user.runs / "expert-math")
    (user.runs / "expert-math" / "metrics.jsonl").unlink()  # nothing was saved: it counts from 0 again
    again = submit(user, *settings)
    assert again["expert-code"] == "done"
    ids |= {stage: job for stage, job in again.items() if job != "done"}
    fault_each(user, {"expert-math": lambda: user.stop_soon(ids["expert-math"])})
    assert user.wait_end(ids["expert-math"], seconds=900) == ["COMPLETED"]
    assert [user.job(ids[stage])["Restarts"] for stage in EXPERTS] == ["1"] * 3, "a fault came too late"
    assert "stopped on request after step" in user.log("expert-math"), "the ranks did not save"
    assert "(exitcode: 75)" in user.log("expert-math"), "torchrun died of the signal"
    fault_joint(user, ids["joint"])
    again = submit(user, *settings)
    assert user.wait_end(again["joint"], seconds=900) == ["COMPLETED"]
    assert_same(user, calm, *EXPERTS, "mix", "joint")


def fault_each(user: User, faults: dict[str, Callable[[], object]]) -> None:
    """Does each of these to its stage as soon as that has done a few steps."""
    while faults:
        wait_for(lambda: any(user.step(stage) >= 8 for stage in faults), f"step 8 of {list(faults)}", seconds=600)
        stage = next(stage for stage in faults if user.step(stage) >= 8)
        faults.pop(stage)()


def fault_joint(user: User, job: str) -> None:
    """The controller is restarted, a node goes down, and the job is cancelled."""
    wait_for(lambda: user.step("joint") >= 4, "step 4 of joint", seconds=600)
    user.daemon("halt", "slurmctld")
    user.daemon("revive", "slurmctld")
    user.wait_nodes("idle", "allocated", "mixed")
    wait_for(lambda: user.step("joint") >= 8, "step 8 of joint", seconds=600)
    user.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    wait_for(lambda: user.job(job).get("Restarts") == "1", "the requeue")
    user.resume("node2")
    wait_for(lambda: "restart 1 of" in user.log("joint"), "the second start", seconds=600)
    user.btx("cancel", "joint")
    user.wait_end(job)
