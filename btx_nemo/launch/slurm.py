"""Talking to Slurm: what jobs are doing, submitting and cancelling them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from btx_nemo.errors import BtxError, UserError

ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)
"""States that a job does not leave by itself."""
GONE = ("invalid job id", "invalid job array")


@dataclass(frozen=True)
class Live:
    """A job as Slurm sees it."""

    state: str
    nodes: str
    time_left: str
    reason: str

    @property
    def ended(self) -> bool:
        """Whether it will not run any more."""
        return self.state in ENDED


def has_slurm() -> bool:
    """Whether `sbatch` is there and configured: Slurm's client without a slurm.conf fails at everything."""
    return (
        shutil.which("sbatch") is not None
        and not subprocess.run(["sbatch", "--version"], capture_output=True).returncode
    )


def jobs(ids: Collection[str]) -> dict[str, Live]:
    """What Slurm knows of these jobs; those it has forgotten are left out. Raises BtxError when it does not answer."""
    if not ids:
        return {}
    bases = sorted({job.partition("_")[0] for job in ids})
    command = [
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--jobs={','.join(bases)}",
        "--format=%i|%T|%N|%L|%r",
    ]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if result.returncode:
        # It says so only where all are unknown; a controller that is away must not be taken for that.
        if any(word in result.stderr.lower() for word in GONE):
            return {}
        raise BtxError(f"Slurm does not answer ({' '.join(result.stderr.split())}); try again when it does")
    found = {}
    for line in result.stdout.splitlines():
        job, *facts = line.split("|")
        if job in ids and len(facts) == 4:
            found[job] = Live(*facts)
    return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without the job it may be in, whose SLURM_* would be taken for settings of a new one."""
    keep = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k in keep} | dict(extra or {})


def sbatch_line(
    name: str, log: str, command: Sequence[str], options: Sequence[str], dependencies: Sequence[str], array: int = 0
) -> list[str]:
    """The line that submits a job; `array` is the number of its tasks."""
    # --export=ALL: a site's SBATCH_EXPORT=NONE would drop BTX_RUNS.
    fixed = ["--parsable", "--export=ALL", f"--job-name={name}", f"--output={log}"]
    many = [f"--array=0-{array - 1}"] if array else []
    # Without the second option a job waits for ever once a job before it has failed.
    waits = [f"--dependency={','.join(dependencies)}", "--kill-on-invalid-dep=yes"] if dependencies else []
    return ["sbatch", *fixed, *many, *waits, *options, *command]


def sbatch(line: Sequence[str], name: str, extra: Mapping[str, str]) -> str:
    """Submits; returns the job's id. Raises UserError with Slurm's reason when it refuses."""
    result = subprocess.run(line, env=environment(extra), capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"sbatch refused {name}: {' '.join(result.stderr.split())}")
    return result.stdout.strip().partition(";")[0]  # "id;cluster" in a federation


def scancel(ids: Iterable[str]) -> None:
    """Cancels jobs. Raises BtxError when Slurm does not take it."""
    result = subprocess.run(["scancel", *ids], env=environment(), capture_output=True, text=True, check=False)
    if result.returncode and not any(word in result.stderr.lower() for word in GONE):
        raise BtxError(f"scancel: {' '.join(result.stderr.split())}")


def shown(line: Sequence[str]) -> str:
    """A line as a shell reads it back. `$job1` in it stays a variable."""
    return " ".join(
        f'"{word}"' if word.startswith("--dependency=") and "$" in word else shlex.quote(word) for word in line
    )
