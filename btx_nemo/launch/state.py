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
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_json
from btx_nemo.errors import UserError
from btx_nemo.processes import started

PIPELINE = "pipeline.json"
WHOLE = re.compile(r"data|chats|mix|export|pair-.*")
"""Stages whose folder appears when it is finished."""
STAGE = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)?", re.ASCII)
ID = re.compile(r"\d+(_\d+)?|local", re.ASCII)


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
    """When it started, in ticks since boot: tells it from a later one with its number; empty where it had ended."""

    @property
    def alive(self) -> bool:
        """Whether it is a process that still runs."""
        return self.pid > 0 and self.started != "" and started(self.pid) == self.started


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
    lock = folder / ".lock"
    try:
        number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"{lock}: cannot be opened ({error.strerror}); remove it") from None
    with open(number, "rb+", buffering=0) as file:
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
    with contextlib.suppress(UserError, TypeError):
        found = Submitted(**read_json(path))
        if _sound(found):
            return found
    raise UserError(
        f"{path}: damaged; remove it, and btx-nemo forgets the job of {stage} (should it still run, see squeue or ps)"
    )


def _sound(one: Submitted) -> bool:
    """Whether every field holds what it may hold."""
    lists = (one.line, one.after)
    if not all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists):
        return False
    if not all(isinstance(text, str) for text in (one.job, one.log, one.started)) or "\0" in one.log:
        return False
    # The id is an argument of scancel.
    return ID.fullmatch(one.job) is not None and type(one.pid) is int and one.pid >= 0


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
    """The stages of a pipeline, in order, with the path that exists when one is finished; after them those of which an
    earlier submission left a job, and those whose scripts were started by hand.

    Raises UserError where nothing was ever submitted or started, and for a damaged file.
    """
    known = {name: Path(str(done)) for name, done in _pipeline(runs / "state" / PIPELINE).items()}
    for kind in ("job.json", "events"):
        found = sorted((runs / "state").glob(f"*.{kind}"), key=_written)
        for name in (path.name.removesuffix(f".{kind}") for path in found):
            if STAGE.fullmatch(name) and name not in known:
                known[name] = runs / name if WHOLE.fullmatch(name) else runs / name / "DONE"
    if not known:
        raise UserError(f"{runs}: nothing was submitted there; give --runs DIR, or see btx-nemo submit --help")
    return known


def _pipeline(path: Path) -> dict[str, object]:
    if not os.path.lexists(path):
        return {}
    with contextlib.suppress(UserError):
        found = read_json(path)
        if all(STAGE.fullmatch(name) and isinstance(done, str) for name, done in found.items()):
            return found
    raise UserError(f"{path}: damaged; remove it, and btx-nemo forgets the order of the stages until the next submit")


def _written(path: Path) -> tuple[float, str]:
    """Jobs are remembered in the order in which they were submitted, those that wait after those they wait for."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime, path.name
    return 0.0, path.name
