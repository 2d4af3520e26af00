"""From what is to do to sbatch lines: experts that are alike become an array, each job waits for those before it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.errors import BtxError
from btx_nemo.launch import found, slurm, state
from btx_nemo.launch.decide import Todo
from btx_nemo.launch.identity import made_path, moving
from btx_nemo.launch.options import without_dependencies


@dataclass(frozen=True)
class Submission:
    """What all jobs of one submission share."""

    scripts: Path
    runs: Path
    environment: Mapping[str, str]
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
        return found.job_name(self.todos[0].job.name) if len(self.todos) == 1 else found.ARRAY

    def line(self, submission: Submission, ids: Mapping[str, str]) -> list[str]:
        """The sbatch line, where `ids` has the job of each stage in `after`."""
        first = self.todos[0].job
        many = len(self.todos) if len(self.todos) > 1 else 0
        words = [todo.job.args[0] for todo in self.todos] if many else list(first.args[:1])
        log = found.logs(submission.runs) + ("%x_%A_%a.out" if many else "%x_%j.out")
        command = [str(submission.scripts / first.script), *words, *first.args[1:]]
        options, waits = without_dependencies(first.options)
        waits = [*self._waits(submission, ids), *waits]
        comment = found.comment(self.todos[0].line)
        return slurm.sbatch_line(self.name, log, command, options, waits, array=many, comment=comment)

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
    alike: dict[object, list[Batch]] = {}
    made: list[Batch] = []
    largest = 0
    for todo in todos:
        job = todo.job
        if todo.action == "run":
            after = tuple(name for name in job.after if name in open_ones)
            first_stage = job.script == "train_expert.sh" and "." not in job.name
            same = alike.setdefault((job.args[1:], job.options, after) if first_stage else job.name, [])
            largest = largest or (slurm.largest_array() if same else 0)
            if not same or len(same[-1].todos) == largest:
                same.append(Batch([], after))
                made.append(same[-1])
            same[-1].todos.append(todo)
    return made


def _replaced(todos: Sequence[Todo]) -> list[str]:
    return [todo.id for todo in todos if todo.action == "run" and todo.id]


def _lines(todos: Sequence[Todo], submission: Submission, ids: dict[str, str]) -> Iterator[tuple[Batch, list[str]]]:
    """Each batch with its sbatch line; whoever takes one puts its ids into `ids` before the next."""
    ids |= {todo.job.name: todo.id for todo in todos if todo.action == "join"}
    for batch in batches(todos):
        yield batch, batch.line(submission, ids)


def submit_all(todos: Sequence[Todo], submission: Submission) -> None:
    """Submits what is to run, remembers the jobs, and prints what happened to every stage.

    Raises UserError when sbatch refuses one, BtxError when Slurm or the disk fails; those before it are cancelled, and
    the records are as they were. Jobs that are replaced are cancelled first and stay so: two that make the same must
    never be in the queue together, a kill of this process in between included.
    """
    runs = submission.runs
    replaced = _replaced(todos)
    if replaced:
        slurm.scancel(replaced)
    earlier = {todo.job.name: state.submitted(runs, todo.job.name) for todo in todos if todo.action == "run"}
    ids: dict[str, str] = {}
    new: list[str] = []
    try:
        for batch, words in _lines(todos, submission, ids):
            new.append(slurm.sbatch(words, batch.name, submission.environment))
            ids |= batch.ids(new[-1])
            for todo in batch.todos:
                _remember(todo, batch, runs, ids)
    except (BtxError, OSError, KeyboardInterrupt) as error:
        left = _undo(new, earlier, todos, runs)
        if replaced:
            left += f", and {', '.join(replaced)}, to be replaced, had been cancelled"
        if isinstance(error, KeyboardInterrupt):
            print(f"interrupted; {left}", file=sys.stderr)
            raise
        raise (type(error) if isinstance(error, BtxError) else BtxError)(f"{error}; {left}") from None
    width = max(len(todo.job.name) for todo in todos)
    for todo in todos:
        said = {"done": "done", "join": todo.why, "run": f"submitted as {ids.get(todo.job.name)} ({todo.why})"}
        print(f"{todo.job.name:<{width}}  {said[todo.action]}")


def _undo(new: Sequence[str], earlier: Mapping[str, state.Submitted | None], todos: Sequence[Todo], runs: Path) -> str:
    """Cancels what was submitted and brings back the records; what it says must not hide why."""
    jobs = set(new)
    with contextlib.suppress(BtxError):  # one whose id sbatch did not tell: no record has it
        joined = {todo.job.name: state.submitted(runs, todo.job.name) for todo in todos if todo.action == "join"}
        known, live = found.jobs_of(runs, {**dict.fromkeys(earlier), **joined}, {})
        unknown = {one.job for name, one in known.items() if name in earlier and one and one.job in live}
        jobs |= {job for job in unknown if job.partition("_")[0] not in new}
    if jobs:
        try:
            slurm.scancel(sorted(jobs))
        except BtxError as error:
            return f"{error}, and so these stay submitted: scancel {' '.join(sorted(jobs))}"
    for name, before in earlier.items():
        with contextlib.suppress(OSError):
            state.forget_submitted(runs, name)
            if before is not None:
                state.save_submitted(runs, name, before)
    return "nothing stays submitted"


def _remember(todo: Todo, batch: Batch, runs: Path, ids: Mapping[str, str]) -> None:
    name = todo.job.name
    log = runs / "logs" / f"{batch.name}_{ids[name]}.out"
    after = [ids[before] for before in batch.after]
    state.save_submitted(runs, name, state.Submitted(job=ids[name], line=todo.line, after=after, log=str(log)))


def script(todos: Sequence[Todo], submission: Submission, aside: Mapping[str, tuple[Path, Path]], *, here: bool) -> str:
    """A shell script that does what a submission would, on Slurm or `here`; why, and what is left out, as comments.

    `aside` has, for stages that are made again, the output and where it is put.
    """
    runs = submission.runs
    lines = [
        "set -e",
        *(f"# {todo.job.name}: {todo.why or todo.action}" for todo in todos),
        *(f"export {name}={shlex.quote(value)}" for name, value in submission.environment.items()),
        f"mkdir -p {shlex.quote(str(runs / 'logs'))}",
    ]
    if _replaced(todos) and not here:
        lines.append(f"scancel {' '.join(_replaced(todos))}")
    for stage, (out, place) in aside.items():
        lines += [
            shlex.join(["mkdir", "-p", str(place.parent)]),
            *map(shlex.join, moving(out, place)),
            shlex.join(["rm", "-f", str(made_path(runs, stage))]),
        ]
    if here:
        return "\n".join([*lines, "export BTX_LOCAL=1", *_here(todos, submission)])
    ids: dict[str, str] = {}
    for number, (batch, words) in enumerate(_lines(todos, submission, ids), 1):
        variable = f"${{job{number}}}"
        ids |= batch.ids(variable)
        lines += [f"job{number}=$({slurm.shown(words)})", f'echo "{batch.name} {variable}"']
    return "\n".join(lines)


def _here(todos: Sequence[Todo], submission: Submission) -> Iterator[str]:
    for todo in todos:
        if todo.action == "run":
            command = shlex.join(["bash", str(submission.scripts / todo.job.script), *todo.job.args])
            lenient = submission.allow_missing and todo.job.name.startswith(("pair-", "expert-"))
            yield f"{command} || echo '{todo.job.name} failed' >&2" if lenient else command
