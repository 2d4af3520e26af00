"""From what is to do to sbatch lines: experts that are alike become an array, each job waits for those before it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.errors import BtxError, UserError
from btx_nemo.launch import slurm, state
from btx_nemo.launch.decide import Todo, line


@dataclass(frozen=True)
class Submission:
    """What all jobs of one submission share."""

    scripts: Path
    runs: Path
    environment: Mapping[str, str]
    options: tuple[str, ...]
    """Options of sbatch."""
    allow_missing: bool


@dataclass(frozen=True)
class Batch:
    """Todos that one sbatch submits: one, or the tasks of an array."""

    todos: list[Todo]
    after: tuple[str, ...]
    """Stages that are not done yet, which it waits for."""

    @property
    def name(self) -> str:
        """The job's name."""
        return f"btx-{self.todos[0].job.name}" if len(self.todos) == 1 else "btx-experts"

    def line(self, submission: Submission, ids: Mapping[str, str]) -> list[str]:
        """The sbatch line, where `ids` has the job of each stage in `after`."""
        first = self.todos[0].job
        many = len(self.todos) if len(self.todos) > 1 else 0
        words = [todo.job.args[0] for todo in self.todos] if many else list(first.args[:1])
        # In a log's name Slurm replaces what follows a percent sign.
        log = f"{submission.runs}/logs/".replace("%", "%%") + ("%x_%A_%a.out" if many else "%x_%j.out")
        command = [str(submission.scripts / first.script), *words, *first.args[1:]]
        options = [*first.options, *submission.options]
        return slurm.sbatch_line(self.name, log, command, options, self._waits(submission, ids), array=many)

    def _waits(self, submission: Submission, ids: Mapping[str, str]) -> list[str]:
        """All before it must have succeeded; where experts may be missing, they must have ended."""
        lenient = submission.allow_missing and self.todos[0].job.name == "mix"
        ends = [name for name in self.after if lenient and name.startswith("expert-")]
        groups = {"afterok": [name for name in self.after if name not in ends], "afterany": ends}
        return [f"{kind}:{':'.join(ids[name] for name in names)}" for kind, names in groups.items() if names]

    def ids(self, job: str) -> dict[str, str]:
        """Stage -> id, from what sbatch printed."""
        many = len(self.todos) > 1
        return {todo.job.name: f"{job}_{task}" if many else job for task, todo in enumerate(self.todos)}


def batches(todos: Sequence[Todo]) -> list[Batch]:
    """What is to run, in order; experts that differ in nothing but their domain become one array."""
    open_ones = {todo.job.name for todo in todos if todo.action != "done"}
    found: dict[object, Batch] = {}
    for todo in todos:
        job = todo.job
        if todo.action == "run":
            after = tuple(name for name in job.after if name in open_ones)
            first_stage = job.script == "train_expert.sh" and "." not in job.name
            key: object = (job.args[1:], job.options, after) if first_stage else job.name
            found.setdefault(key, Batch([], after)).todos.append(todo)
    return list(found.values())


def _replaced(todos: Sequence[Todo]) -> list[str]:
    return [todo.id for todo in todos if todo.action == "run" and todo.id]


def _lines(todos: Sequence[Todo], submission: Submission, ids: dict[str, str]) -> Iterator[tuple[Batch, list[str]]]:
    """Each batch with its sbatch line; whoever takes one puts its ids into `ids` before the next."""
    ids |= {todo.job.name: todo.id for todo in todos if todo.action == "join"}
    for batch in batches(todos):
        yield batch, batch.line(submission, ids)


def submit_all(todos: Sequence[Todo], submission: Submission) -> None:
    """Submits what is to run, remembers the jobs, and prints what happened to every stage.

    Raises UserError when sbatch refuses one; those before it are cancelled.
    """
    if _replaced(todos):
        slurm.scancel(_replaced(todos))
    ids: dict[str, str] = {}
    new: list[str] = []
    try:
        for batch, words in _lines(todos, submission, ids):
            new.append(slurm.sbatch(words, batch.name, submission.environment))
            ids |= batch.ids(new[-1])
            for todo in batch.todos:
                _remember(todo, batch, submission.runs, ids)
    except BtxError as error:
        if new:
            slurm.scancel(new)
        for todo in todos:
            if todo.action == "run":
                state.forget_submitted(submission.runs, todo.job.name)
        raise UserError(f"{error}; nothing stays submitted") from None
    width = max(len(todo.job.name) for todo in todos)
    for todo in todos:
        said = {"done": "done", "join": todo.why, "run": f"submitted as {ids.get(todo.job.name)} ({todo.why})"}
        print(f"{todo.job.name:<{width}}  {said[todo.action]}")


def _remember(todo: Todo, batch: Batch, runs: Path, ids: Mapping[str, str]) -> None:
    name = todo.job.name
    log = runs / "logs" / f"{batch.name}_{ids[name]}.out"
    after = [ids[before] for before in batch.after]
    state.save_submitted(runs, name, state.Submitted(job=ids[name], line=line(todo.job), after=after, log=str(log)))


def script(todos: Sequence[Todo], submission: Submission, *, here: bool) -> str:
    """A shell script that does what a submission would, on Slurm or `here`; why, and what is left out, as comments."""
    environment = submission.environment.items()
    lines = [
        "set -e",
        *(f"# {todo.job.name}: {todo.why or todo.action}" for todo in todos),
        *(f"export {name}={shlex.quote(value)}" for name, value in environment),
        f"mkdir -p {shlex.quote(str(submission.runs / 'logs'))}",
    ]
    if here:
        jobs = [todo.job for todo in todos if todo.action == "run"]
        return "\n".join([*lines, *(shlex.join(["bash", str(submission.scripts / j.script), *j.args]) for j in jobs)])
    if _replaced(todos):
        lines.append(f"scancel {' '.join(_replaced(todos))}")
    ids: dict[str, str] = {}
    for number, (batch, words) in enumerate(_lines(todos, submission, ids), 1):
        variable = f"${{job{number}}}"
        ids |= batch.ids(variable)
        lines += [f"job{number}=$({slurm.shown(words)})", f'echo "{batch.name} {variable}"']
    return "\n".join(lines)
