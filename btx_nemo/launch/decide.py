"""What a submission has to do: what is done is left alone, what runs is joined, the rest is made."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.errors import UserError
from btx_nemo.launch.composed import configured
from btx_nemo.launch.graph import DATA, Job
from btx_nemo.launch.identity import Made, check_there, made_of, made_path, refusal
from btx_nemo.launch.places import within
from btx_nemo.launch.state import Submitted, events


@dataclass(frozen=True, kw_only=True)
class Todo:
    """One stage, and what happens to it."""

    job: Job
    action: str
    """done, join or run."""
    why: str
    """Why it runs, or the id of the job that is joined."""
    id: str = ""
    """The job that is joined, or that is cancelled because this one replaces it."""
    line: list[str]
    """What tells one submission of the stage from another."""


def decide(
    jobs: Sequence[Job],
    runs: Path,
    submitted: Mapping[str, Submitted | None],
    live: Mapping[str, str],
    environment: Mapping[str, str],
    redo: Collection[str] = (),
) -> list[Todo]:
    """A Todo for every job of a graph, in its order.

    `live` has the states of the jobs in Slurm that have not ended, by their ids, `environment` what jobs are told.

    Raises UserError for a stage to be made again that is running, for an output that was made with other settings or
    of something that is missing now, and for a running job that a change would make useless: other settings, or another
    input.
    """
    todos: dict[str, Todo] = {}
    for job in jobs:
        before = submitted.get(job.name)
        state, words = _state(before, live), line(job, environment)
        todos[job.name] = _decide(job, runs, before, state, words, todos, again=job.name in redo)
    return list(todos.values())


def redone(jobs: Sequence[Job], runs: Path, redo: Collection[str]) -> list[str]:
    """Stages to be made again for `redo`, in the graph's order: these, and those after them that would not notice.

    A stage that has recorded what it was made of notices by itself, and stays where the same comes out again. Raises
    UserError for an unknown stage.
    """
    known = [job.name for job in jobs]
    for name in redo:
        if name not in known:
            raise UserError(f"--redo {name}: no such stage; known: {', '.join(known)}")
    names: dict[str, Job] = {}
    for job in jobs:
        before = [names[name] for name in job.after if name in names and not _unread(name, job)]
        seen = job.inputs.values() if made_of(runs, job.name) else ()
        blind = [one for one in before if not within(one.out, seen)]
        if job.name in redo or blind:
            names[job.name] = job
    return list(names)


def _unread(data: str, job: Job) -> bool:
    """Whether one of `DATA` is plainly not what a training reads: its path is the other's, as conf/train has them."""
    if data not in DATA or not job.script.startswith("train_"):
        return False
    other = {"data": os.environ.get("BTX_CHATS") or "runs/chats", "chats": os.environ.get("BTX_DATA") or "runs/data"}
    config = configured(job.name, job.args)
    return config is not None and other["data"] != other["chats"] and config.data.path == other[data]


def line(job: Job, environment: Mapping[str, str]) -> list[str]:
    """What tells one submission of a stage from another: script, arguments, options of sbatch, and environment."""
    return [job.script, *job.args, *job.options, *(f"{name}={value}" for name, value in sorted(environment.items()))]


def _state(record: Submitted | None, live: Mapping[str, str]) -> str:
    """The state of a stage's job; empty when it has ended."""
    if record is None:
        return ""
    if record.pid:
        return "RUNNING" if record.alive else ""
    return live.get(record.job, "")


def _decide(
    job: Job,
    runs: Path,
    record: Submitted | None,
    state: str,
    words: list[str],
    todos: Mapping[str, Todo],
    *,
    again: bool,
) -> Todo:
    before = [todos[name] for name in job.after if todos[name].action != "done"]
    why = "to be made again" if again else _why(job, runs, record, before)
    if not why and not before:
        return Todo(job=job, action="done", why="", line=words)
    why = why or f"follows {before[0].job.name}"
    if not state or record is None:
        return Todo(job=job, action="run", why=why, line=words)
    # A job that waits for others than it would have to is of no use, and one that has other settings neither.
    joined = all(todo.action == "join" and todo.id in record.after for todo in before)
    other = "" if again or not joined else _other(job, runs, record, state, words)
    if joined and not other and not again:
        return Todo(job=job, action="join", why=f"{state.lower()} as {record.job}", id=record.job, line=words)
    if state != "PENDING":
        raise UserError(
            f"{job.name} is {state.lower()} as job {record.job}, and this submission would replace it "
            f"({other or why}); wait for it, or stop it: btx-nemo cancel {job.name}"
        )
    return Todo(job=job, action="run", why=why, id=record.job, line=words)


def _other(job: Job, runs: Path, record: Submitted, state: str, words: Sequence[str]) -> str:
    """In what a job that has not ended differs from what would be submitted now; empty where it does not."""
    if not record.line:
        return "with which settings is not known"
    if record.line != words:
        gone = [f"no longer {word}" for word in record.line if word not in words]
        return ", ".join([*(f"now {word}" for word in words if word not in record.line), *gone]) or "another order"
    begun = [event.time for event in events(runs, job.name) if event.what == "start" and event.job == record.job]
    if state != "PENDING" and begun and _age(job, runs) >= begun[-1]:  # what it is made of is recorded after its start
        stale = _stale(job, runs)
        return f"it is made of another {', '.join(stale)}" if stale else ""
    return ""


def _age(job: Job, runs: Path) -> float:
    path = made_path(runs, job.name)
    return path.stat().st_mtime if path.exists() else 0.0


def _stale(job: Job, runs: Path) -> list[str]:
    then = made_of(runs, job.name)
    if then is None or not os.path.lexists(job.out):
        return []
    return then.changed_inputs(Made.now(job.name, job.inputs, job.args))


def _why(job: Job, runs: Path, record: Submitted | None, before: Sequence[Todo]) -> str:
    """Why a stage has to be made, whatever the others do; empty for one that is as it should be.

    What those `before` it are going to make need not be there.
    """
    if not job.out.exists() and not job.done.exists():
        return "new" if record is None else f"its last job, {record.job}, left no result"
    then = made_of(runs, job.name)
    if then is not None and os.path.lexists(job.out):
        now = Made.now(job.name, job.inputs, job.args)
        made = [name for name, path in job.inputs.items() if any(within(todo.job.out, [path]) for todo in before)]
        check_there(runs, job.name, [name for name in then.missing(now) if name not in made], job.inputs)
        stale, changed = then.changed_inputs(now), then.changed_settings(now)
        if stale and job.done.exists():
            return f"stale: another {', '.join(stale)}"
        if changed and not stale:
            raise UserError(f"{refusal(job.name, job.out, changed)}")
    return "" if job.done.exists() else "unfinished"
