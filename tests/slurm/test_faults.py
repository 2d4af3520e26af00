"""What happens to clusters, each ending in the same weights as a calm run; with a stand-in for the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from btx_testing.slurm import User, wait_for, with_stand_in

pytestmark = pytest.mark.slurm
IN_ADVANCE = ("pipeline_here",)  # not those on the nodes, which do not stay up

WORDS = ("math", "code", "until=export", "experts.math.set.steps=60", "experts.math.nodes=2", "joint.set.steps=3")


def weights(user: User) -> str:
    """Of the exported mixture: they follow from every step of everything before."""
    return (user.runs / "export" / "weights").read_text()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the pipeline where nothing happened, on this machine without Slurm."""
    import subprocess
    import sys

    from btx_testing.slurm import FAKE, REPO, plain_environment

    folder = tmp_path_factory.mktemp("calm")
    (folder / "seed").mkdir()
    environment = plain_environment() | {"BTX_RUNS": str(folder), "BTX_CLI": str(FAKE), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "btx_nemo", "submit", "--local", *WORDS, "local_jobs=2"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    return (folder / "export" / "weights").read_text()


def begin(user: User) -> dict[str, str]:
    """The pipeline, with its longest expert in its midst."""
    ids = user.submit(*WORDS)
    user.wait_step("expert-math", 5)
    return ids


def end(user: User, ids: dict[str, str], calm: str) -> None:
    jobs = [job for job in ids.values() if job != "done"]
    assert user.wait_end(*jobs) == ["COMPLETED"] * len(jobs)
    assert weights(user) == calm


@pytest.fixture(scope="module")
def limited(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[User, dict[str, str]]:
    """A run with a limit of one minute and a signal 50 seconds before, on the node to which the next tests do nothing.

    Slurm looks every 30 s whether it is time for the signal: the run must be longer. They do not wait for it.
    """
    user = with_stand_in(cluster, tmp_path_factory.mktemp("limited"))
    limit = ("set.steps=640", "time='00:01:00'", "sbatch=['--signal=B:USR1@50','--nodelist=node1']")
    return user, user.submit("prose", "until=experts", *(f"experts.prose.{word}" for word in limit))


def test_a_node_goes_down_a_requeue_and_a_stop_before_the_time_limit(user: User, calm: str, limited: object) -> None:
    """In a pipeline each: the first waits for its new start while the others get theirs."""
    requeued, stopped = (with_stand_in(user.cluster, user.cwd / name) for name in ("requeued", "stopped"))
    ids = begin(user)
    user.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    wait_for(lambda: user.job(ids["expert-math"]).get("Restarts") == "1", "the requeue")
    user.resume("node2")
    ids_requeued = begin(requeued)
    user.run("scontrol", "requeue", ids_requeued["expert-math"])
    ids_stopped = begin(stopped)
    user.stop_soon(ids_stopped["expert-math"])

    end(user, ids, calm)
    end(requeued, ids_requeued, calm)
    assert user.job(ids_requeued["expert-math"])["Restarts"] == "1"
    end(stopped, ids_stopped, calm)
    first, second = stopped.starts("expert-math")
    assert first["stop"] and second["first"] >= 5 and not second["stop"]
    log = stopped.log("expert-math")
    assert "restart 0 of 10, 2 node(s) x 2 rank(s)" in log and "restart 1 of 10" in log, "the log was truncated"


@pytest.mark.slow
def test_a_node_dies(user: User, calm: str, limited: object) -> None:
    """SIGKILL to all on a node, which Slurm finds out by itself."""
    if not (user.cluster / "hosts").exists():
        pytest.skip("the nodes have no names of their own: unshare --mount --uts needs root")
    ids = begin(user)
    user.daemon("kill", "node2")
    wait_for(lambda: user.job(ids["expert-math"]).get("Restarts") == "1", "the requeue", seconds=180)
    user.daemon("revive", "node2")
    user.wait_nodes("idle", "allocated", "mixed")
    end(user, ids, calm)


@pytest.mark.slow
def test_slurm_s_own_signal_before_the_limit(limited: tuple[User, dict[str, str]]) -> None:
    user, ids = limited
    assert user.wait_end(*ids.values(), seconds=240) == ["COMPLETED"]
    starts = user.starts("expert-prose")
    assert starts[0]["stop"] and starts[-1]["first"] > 0


def test_a_job_is_cancelled_and_submitted_again(user: User, calm: str) -> None:
    ids = begin(user)
    user.btx("cancel", "expert-math")
    assert set(user.wait_end(*(ids[s] for s in ids if s != "expert-code"))) == {"CANCELLED"}
    again = user.submit(*WORDS)
    assert again["expert-code"] in ("done", ids["expert-code"])
    end(user, again, calm)
    assert user.starts("expert-math")[-1]["first"] >= 5


def test_the_controller_is_restarted(user: User, calm: str) -> None:
    ids = begin(user)
    user.daemon("halt", "slurmctld")
    user.daemon("revive", "slurmctld")
    user.wait_nodes("idle", "allocated", "mixed")
    assert user.submit(*WORDS)["joint"] == ids["joint"]
    end(user, ids, calm)


def test_slurm_forgets_every_job(user: User, calm: str) -> None:
    """A purged parent: what depends on it starts at once, and looks."""
    ids = user.submit(*WORDS)
    user.btx("cancel")
    user.wait_end(*ids.values())
    user.daemon("halt", "slurmctld")
    user.daemon("forget", "slurmctld")
    user.wait_nodes("idle")
    assert not user.job(ids["expert-math"])
    mix = user.sbatch("mix.sh", "math", options=f"--dependency=afterok:{ids['expert-math']}")
    assert user.wait_end(mix) == ["FAILED"]
    assert "expert-math/DONE is missing" in (user.cwd / f"btx-mix_{mix}.out").read_text()
    end(user, user.submit(*WORDS), calm)


def test_the_disk_is_full_in_one_expert_s_folder(user: User, calm: str) -> None:
    words = (*WORDS[:2], "experts.math.set.fill=true", *WORDS[2:])
    ids = user.submit(*words)
    assert user.wait_end(*ids.values()) == ["FAILED", "COMPLETED", *["CANCELLED"] * 3]
    row = user.btx("status").splitlines()[1]
    assert row.split()[1] == "failed" and row.endswith("expert-math/checkpoints: the disk or a quota is full")
    (user.runs / "room").touch()
    again = user.submit(*words)
    assert again["expert-code"] == "done"
    end(user, again, calm)
