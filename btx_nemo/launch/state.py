"""The state of a pipeline: files beside its runs, written by `submit` and by the scripts.

runs/state/pipeline.json        the stages, in order
runs/state/<stage>.job.json     the job that was last submitted for a stage
runs/state/<stage>.events       a line for every start and end: time, event, job, restart, nodes
runs/state/<stage>.made.json    what its output was made of (identity.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_json
from btx_nemo.errors import UserError

PIPELINE = "pipeline.json"
WHOLE = ("data", "mix", "export")
"""Stages whose folder appears when it is finished."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that was submitted for a stage, or a process that was started for it."""

    job: str
    """Slurm's id, 12 or 12_3; of a process on this machine, local."""
    line: list[str]
    """Script, arguments and options, without dependencies."""
    after: list[str]
    """Ids of the jobs it waits for."""
    log: str
    """Its output."""
    pid: int = 0
    """The process."""
    started: str = ""
    """When it started, in ticks since boot: tells it from a later one with the same number."""


@dataclass(frozen=True)
class Event:
    """One line of a stage's story."""

    time: float
    what: str
    """start, done, failed, stopped or requeue."""
    job: str
    restart: int
    nodes: str


@contextlib.contextmanager
def submitting(runs: Path) -> Iterator[None]:
    """Held by the one `submit` that may be at work in `runs`. Raises UserError when another is."""
    folder = runs / "state"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{runs}: another btx-nemo submit is at work there; wait for it, or stop it") from None
        yield


def save_submitted(runs: Path, stage: str, submitted: Submitted) -> None:
    """Remembers a stage's job."""
    write_file(runs / "state" / f"{stage}.job.json", json.dumps(dataclasses.asdict(submitted)) + "\n")


def forget_submitted(runs: Path, stage: str) -> None:
    """Forgets it."""
    (runs / "state" / f"{stage}.job.json").unlink(missing_ok=True)


def submitted(runs: Path, stage: str) -> Submitted | None:
    """A stage's last job, or None. Raises UserError for a damaged file."""
    path = runs / "state" / f"{stage}.job.json"
    if not path.exists():
        return None
    try:
        return Submitted(**read_json(path))
    except TypeError:
        raise UserError(f"{path}: damaged; remove it after a look at squeue") from None


def events(runs: Path, stage: str) -> list[Event]:
    """A stage's story so far; a line that is damaged or still being written is left out."""
    path = runs / "state" / f"{stage}.events"
    if not path.exists():
        return []
    found = []
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            time, what, job, restart, nodes = line.split("\t")
            found.append(Event(float(time), what, job, int(restart), nodes))
    return found


def save_pipeline(runs: Path, done: Mapping[str, Path]) -> None:
    """Remembers the stages, in order, each with the path that exists when it is finished."""
    write_file(runs / "state" / PIPELINE, json.dumps({name: str(path) for name, path in done.items()}) + "\n")


def stages(runs: Path) -> dict[str, Path]:
    """The stages of a pipeline, in order, with the path that exists when one is finished; after them those whose
    scripts were started by hand. Raises UserError where nothing was ever submitted or started.
    """
    path = runs / "state" / PIPELINE
    known = {name: Path(str(done)) for name, done in (read_json(path) if path.exists() else {}).items()}
    by_hand = sorted({path.name.removesuffix(".events") for path in (runs / "state").glob("*.events")} - known.keys())
    known |= {name: runs / name if name in WHOLE else runs / name / "DONE" for name in by_hand}
    if not known:
        raise UserError(f"{runs}: nothing was submitted there; give --runs DIR, or see btx-nemo submit --help")
    return known
