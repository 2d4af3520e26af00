"""A user of a throw-away Slurm: submits, waits, looks, and does the things that happen to clusters."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
TOOL = REPO / "tests" / "slurm" / "local_cluster.sh"
FAKE = REPO / "tests" / "slurm" / "fake_btx.py"
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
MISSING = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name, path=SEARCH) is None]
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def plain_environment() -> dict[str, str]:
    """This environment without what a Slurm or a user of btx-nemo may have set."""
    ours = ("SLURM_", "SBATCH_", "SRUN_", "BTX_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
    """Returns as soon as the condition holds; the machine may be busy."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {seconds} s"
        time.sleep(0.1)


@dataclass(frozen=True)
class User:
    """Somebody with a runs folder on that cluster."""

    cluster: Path
    env: dict[str, str]
    cwd: Path

    @property
    def runs(self) -> Path:
        return Path(self.env["BTX_RUNS"])

    def having(self, **changes: str) -> User:
        """The same user with another environment."""
        return dataclasses.replace(self, env={**self.env, **changes})

    def run(self, *command: str | Path, code: int = 0) -> str:
        """Output of a command that ends with this code."""
        words = list(map(str, command))
        result = subprocess.run(words, env=self.env, cwd=self.cwd, capture_output=True, text=True, timeout=90)
        assert result.returncode == code, f"{words}: {result.stdout}{result.stderr}"
        return (result.stdout if code == 0 else result.stderr).strip()

    def btx(self, *arguments: str, code: int = 0) -> str:
        """Output of btx-nemo itself."""
        return self.run(sys.executable, "-m", "btx_nemo", *arguments, code=code)

    def submit(self, *arguments: str) -> dict[str, str]:
        """`btx-nemo submit`: stage -> job, "done", or how it was joined."""
        found = {}
        for line in self.btx("submit", *arguments).splitlines():
            stage, _, said = line.partition("  ")
            if not said:  # what was put aside
                continue
            job = re.search(r"(?:submitted|running|pending) as (\S+)", said)
            found[stage] = job[1] if job else said.strip()
        return found

    def sbatch(self, script: str, *arguments: str, options: str = "") -> str:
        """Id of a script of slurm/ that was submitted by hand."""
        return self.run("sbatch", "--parsable", *options.split(), REPO / "slurm" / script, *arguments)

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of a job."""
        command = ["scontrol", "--oneliner", "show", "job", job]
        shown = subprocess.run(command, env=self.env, capture_output=True, text=True)
        return dict(re.findall(r"(\w+)=(\S*)", shown.stdout.partition("\n")[0]))

    def wait_end(self, *jobs: str, seconds: float = 120) -> list[str]:
        """The final states, in order. A requeued job is on its way again, not at its end."""
        wait_for(lambda: all(self.job(job).get("JobState") in FINAL for job in jobs), f"the end of {jobs}", seconds)
        return [self.job(job)["JobState"] for job in jobs]

    def wait_step(self, stage: str, step: int) -> None:
        """Until a training has done so many steps."""
        wait_for(lambda: self.step(stage) >= step, f"step {step} of {stage}")

    def step(self, stage: str) -> int:
        """The last step in a run's metrics."""
        path = self.runs / stage / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else -1

    def starts(self, stage: str) -> list[dict]:
        """What the stand-in for the command wrote of its starts."""
        return [json.loads(line) for line in (self.runs / stage / "starts.jsonl").read_text().splitlines()]

    def stop_soon(self, job: str) -> None:
        """What Slurm sends before the time limit, to the batch script alone."""
        self.run("scancel", "--signal=USR1", "--batch", job)

    def log(self, stage: str) -> str:
        """A stage's log."""
        return self.btx("logs", stage, "--lines=1000")

    def daemon(self, what: str, name: str) -> None:
        """Kills or revives a daemon of the cluster."""
        self.run(TOOL, what, self.cluster, name)

    def resume(self, node: str) -> None:
        """Brings back a node that was set down, unless Slurm has done so by itself, which refuses this command."""
        command = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
        result = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert result.returncode == 0 or "Invalid node state" in result.stderr, result.stderr
        self.wait_nodes("idle", "allocated", "mixed")

    def wait_nodes(self, *states: str) -> None:
        """Until both nodes are in one of these states."""

        def ready() -> bool:
            command = ["sinfo", "--noheader", "--Node", "--format=%T"]
            shown = subprocess.run(command, env=self.env, capture_output=True, text=True)
            found = shown.stdout.split()
            return len(found) == 2 and all(state in states for state in found)

        wait_for(ready, f"nodes {states}")


def with_stand_in(cluster: Path, folder: Path) -> User:
    """One with a stand-in for the command, two GPUs a job, and a space in the name of the runs folder."""
    runs = folder / "my runs"
    (runs / "seed").mkdir(parents=True)
    (runs / "seed" / "config.json").write_text("{}")
    environment = plain_environment() | {
        "SLURM_CONF": str(cluster / "slurm.conf"),
        "BTX_RUNS": str(runs),
        "BTX_CLI": str(FAKE),
        "BTX_PYTHON": sys.executable,
        "SBATCH_GRES": "gpu:2",
        "PYTHONPATH": str(REPO),
    }
    return User(cluster, environment, folder)
