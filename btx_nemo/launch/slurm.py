"""Talking to Slurm: what jobs are doing, submitting and cancelling them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from btx_nemo.errors import BtxError, EnvironmentLacks, UserError

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
LARGEST_ARRAY = 1001
"""MaxArraySize where a site has not set it."""
PATIENCE = 120
"""Seconds until a command of Slurm is given up."""
SETTINGS = ("SLURM_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_")
"""Variables that would change what these commands do: of the job that this may run in, and a user's own habits."""
FIELDS = {
    "JobArrayID": 64,
    "State": 32,
    "Name": 300,
    "Comment": 256,
    "Dependency": 8192,
    "STDOUT": 4096,
    "Command": 8192,
}
"""What `named` asks of each job, and how many characters of it."""


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


@dataclass(frozen=True)
class Named:
    """A job in the queue, as its submission told Slurm."""

    job: str
    """Its id, 12 or 12_3."""
    state: str
    name: str
    comment: str
    after: list[str]
    """Ids of the jobs it waits for."""
    log: str
    """As it was given, with %x and %j, or filled in: that depends on Slurm's version."""
    command: list[str]
    """The script and its arguments; those with spaces are several."""


def absent() -> str:
    """Why there is no Slurm; empty where `sbatch` is there and configured: without a slurm.conf it fails at everything.

    Raises EnvironmentLacks when it does not answer.
    """
    if shutil.which("sbatch") is None:
        return "no sbatch on PATH"
    result = _run(["sbatch", "--version"])
    return "" if not result.returncode else f"sbatch fails ({' '.join(result.stderr.split()) or result.returncode})"


def has_slurm() -> bool:
    """Whether Slurm is there."""
    return not absent()


def _run(command: Sequence[str], extra: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """What a command of Slurm says. Raises EnvironmentLacks when it hangs."""
    try:
        return subprocess.run(
            command,
            env=environment(extra),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentLacks(f"{command[0]}: no answer in {PATIENCE} s; try again when Slurm answers") from None


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
    result = _run(command)
    if result.returncode:
        # It says so only where all are unknown; a controller that is away must not be taken for that.
        if any(word in result.stderr.lower() for word in GONE):
            return {}
        raise _silence(result)
    found = {}
    for line in result.stdout.splitlines():
        job, *facts = line.split("|")
        if job in ids and len(facts) == 4:
            found[job] = Live(*facts)
    return found


def _silence(result: subprocess.CompletedProcess[str]) -> BtxError:
    return BtxError(f"Slurm does not answer ({' '.join(result.stderr.split())}); try again when it does")


def named(names: Collection[str]) -> list[Named]:
    """The jobs of these names that have not ended, whoever submitted them. Raises BtxError when Slurm is silent."""
    fields = ",".join(f"{field}:{width}\x1f" for field, width in FIELDS.items())
    result = _run(
        ["squeue", "--noheader", "--array", "--states=all", f"--name={','.join(names)}", f"--Format={fields}"]
    )
    if result.returncode:
        raise _silence(result)
    found = []
    for line in result.stdout.split("\n"):
        facts = [fact.strip() for fact in line.split("\x1f")]
        if len(facts) > len(FIELDS) and facts[1] not in ENDED and facts[2] in names:
            job, state, name, comment, after, log, command = facts[: len(FIELDS)]
            ids = re.findall(r"[:,](\d+(?:_\d+)?)", after)
            found.append(Named(job, state, name, comment, ids, log, command.split()))
    return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without `SETTINGS`, save for where Slurm is."""
    keep = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS) or k in keep} | dict(extra or {})


def sbatch_line(
    name: str,
    log: str,
    command: Sequence[str],
    options: Sequence[str],
    dependencies: Sequence[str],
    array: int = 0,
    comment: str = "",
) -> list[str]:
    """The line that submits a job; `array` is the number of its tasks."""
    # --export=ALL: a site's SBATCH_EXPORT=NONE would drop BTX_RUNS.
    fixed = ["--parsable", "--export=ALL", f"--job-name={name}", f"--output={log}", f"--comment={comment}"]
    many = [f"--array=0-{array - 1}"] if array else []
    # Without the second option a job waits for ever once a job before it has failed.
    waits = [f"--dependency={','.join(dependencies)}", "--kill-on-invalid-dep=yes"] if dependencies else []
    return ["sbatch", *fixed, *many, *waits, *options, *command]


def sbatch(line: Sequence[str], name: str, extra: Mapping[str, str]) -> str:
    """Submits; returns the job's id. Raises UserError with Slurm's reason when it refuses."""
    result = _run(line, extra)
    if result.returncode:
        raise UserError(f"sbatch refused {name}: {' '.join(result.stderr.split())}")
    # A site's wrapper may say more before; "id;cluster" in a federation.
    last = result.stdout.strip().rpartition("\n")[2].strip()
    if not re.fullmatch(r"\d+(;\S+)?", last, re.ASCII):
        raise UserError(f"sbatch printed no job id for {name}, but {result.stdout.strip()[-200:]!r}")
    return last.partition(";")[0]


def largest_array() -> int:
    """How many tasks an array may have; Slurm's default where it does not say."""
    with contextlib.suppress(OSError, EnvironmentLacks):
        found = re.search(
            r"^MaxArraySize\s*=\s*(\d+)\s*$", _run(["scontrol", "show", "config"]).stdout, re.M | re.ASCII
        )
        if found:
            return max(int(found[1]), 1)  # at 0 there are none
    return LARGEST_ARRAY


def scancel(ids: Iterable[str]) -> None:
    """Cancels jobs. Raises BtxError when Slurm does not take it."""
    result = _run(["scancel", *ids])
    if result.returncode and not any(word in result.stderr.lower() for word in GONE):
        raise BtxError(f"scancel: {' '.join(result.stderr.split())}")


def shown(line: Sequence[str]) -> str:
    """A line as a shell reads it back. `$job1` in it stays a variable."""
    return " ".join(
        f'"{word}"' if word.startswith("--dependency=") and "$" in word else shlex.quote(word) for word in line
    )
