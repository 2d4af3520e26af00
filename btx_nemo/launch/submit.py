"""Submitting a pipeline: to Slurm as jobs that depend on each other, or to this machine.

The work is in the scripts of `slurm/`. Here they are chained, and what need not be done again is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from btx_nemo.config.build import build
from btx_nemo.config.domains import check_domain
from btx_nemo.config.flat import flat
from btx_nemo.config.load import load
from btx_nemo.errors import BtxError, EnvironmentLacks, UserError
from btx_nemo.launch import found, slurm, state
from btx_nemo.launch.batches import Submission, script, submit_all
from btx_nemo.launch.config import PipelineConfig
from btx_nemo.launch.decide import Todo, decide, line, redone
from btx_nemo.launch.graph import Job, graph
from btx_nemo.launch.identity import free_place, made_of, made_path, put_aside
from btx_nemo.launch.local import run_here
from btx_nemo.launch.options import check_options
from btx_nemo.launch.places import places
from btx_nemo.launch.settings import check_settings
from btx_nemo.launch.words import spell

ENDING_SECONDS = 180
"""How long a job may take to end once it is told to, Slurm's KillWait included, until `submit` gives up on it."""


def submit(
    words: Sequence[str],
    *,
    config_name: str = "pipeline",
    config_path: str | None = None,
    runs: Path | None = None,
    dry_run: bool = False,
    local: bool = False,
    allow_missing: bool = False,
    redo: Collection[str] = (),
    sbatch_options: Sequence[str] = (),
) -> None:
    """Submits what a pipeline still lacks. `words` are domains to add, and overrides of conf/submit (KEY=VALUE).

    Without Slurm, or with `local`, the same scripts run here. With `dry_run` a shell script is printed that would do
    the same, and nothing is changed. With `allow_missing` the mix goes on without experts that fail. Stages in `redo`
    are made again, and what is there of them is put aside.

    Raises UserError for a configuration that cannot be, for what sbatch refuses (nothing stays submitted then), and
    where an output was made with other settings; BtxError when Slurm does not answer or a script fails here.
    """
    config = _pipeline(words, config_name, config_path, runs)
    jobs = [
        dataclasses.replace(job, options=(*job.options, *sbatch_options))
        for job in graph(config, allow_missing=allow_missing)
    ]
    for job in jobs:
        check_options(job.name, job.options)
    at = places(config)
    environment = {**at.environment, **_settings(config)}
    submission = Submission(scripts_dir(), at.runs, environment, allow_missing)
    here, paired = local or _is_absent(), config.pair is not None
    redo = redone(jobs, at.runs, redo)
    if dry_run:
        todos = _todos(jobs, submission, redo, paired=paired, here=here, save=False)
        aside = {job.name: (job.out, free_place(at.runs, job.name)) for job in _again(jobs, redo)}
        print(script(todos, submission, aside, here=here))
        return
    with state.submitting(at.runs):
        todos = _todos(jobs, submission, redo, paired=paired, here=here, save=True)
        state.save_pipeline(at.runs, {job.name: job.done for job in jobs})
        (at.runs / "logs").mkdir(exist_ok=True)  # Slurm fails a job at once when the folder of its log is missing
        with _put_aside(_again(jobs, redo), at.runs) as put_back:
            if here:
                put_back.pop_all()
                run_here(todos, submission, limit=config.local_jobs)
            else:
                submit_all(todos, submission)
                put_back.pop_all()


def _is_absent() -> bool:
    """Whether there is no Slurm; says so, because it may be by mistake."""
    why = slurm.absent()
    if why:
        print(f"{why}: everything runs on this machine", file=sys.stderr)
    return bool(why)


def _again(jobs: Sequence[Job], redo: Collection[str]) -> list[Job]:
    """Those that are made again and have an output."""
    return [job for job in jobs if job.name in redo and os.path.lexists(job.out)]


@contextlib.contextmanager
def _put_aside(jobs: Sequence[Job], runs: Path) -> Iterator[contextlib.ExitStack]:
    """Puts outputs aside, and back again at the end unless the stack that it gives is emptied before."""
    with contextlib.ExitStack() as put_back:
        for job in jobs:
            made = made_path(runs, job.name)
            text = made.read_bytes() if made.exists() else None
            place = put_aside(runs, job.name, job.out)
            put_back.callback(_restore, job.out, place, made, text)
            print(f"{job.name}: put aside as {place}")
        yield put_back


def _restore(out: Path, place: Path, made: Path, text: bytes | None) -> None:
    if os.path.lexists(out):
        print(f"{out}: was begun again before that failed; what was there is {place}", file=sys.stderr)
        return
    os.rename(place, out)
    if text is not None:
        made.write_bytes(text)
    print(f"{out}: put back")


def scripts_dir() -> Path:
    """The `slurm/` of this installation: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "slurm", package.parent / "slurm"):
        if (candidate / "train_expert.sh").is_file():
            return candidate
    raise EnvironmentLacks(f"no slurm/ scripts in or beside {package}; install btx-nemo again")


def _pipeline(words: Sequence[str], name: str, path: str | None, runs: Path | None) -> PipelineConfig:
    domains = [word for word in words if "=" not in word and not word.startswith("~")]
    for domain in domains:
        check_domain(domain, f"domain {domain!r}")
        if domains.count(domain) > 1:
            raise UserError(f"domain {domain!r} is named twice; name it once")
    overrides = [f"experts.{domain}={{}}" for domain in domains] + [word for word in words if word not in domains]
    if runs is not None:
        overrides.append(f"runs={spell(str(runs))}")
    values = load("submit", name, overrides, path)
    _check_times(values, f"submit/{name}.yaml")
    return build(PipelineConfig, values, where=f"submit/{name}.yaml")


def _check_times(values: Any, where: str) -> None:
    """YAML takes an unquoted 12:00:00 for seconds in base 60, which sbatch would take for minutes."""
    for key, value in flat(values).items():
        if key.endswith(".time") and ".set." not in key and type(value) is int:
            hours = f"{value // 3600}:{value // 60 % 60:02}:{value % 60:02}"
            raise UserError(f'{where}: {key}={value}: a number; give it in quotes: "{hours}", or minutes as "{value}"')


def _settings(config: PipelineConfig) -> dict[str, str]:
    """What the scripts learn from their environment."""
    chosen = {}
    if not os.environ.get("BTX_CONTAINER"):  # a container has a Python of its own
        chosen["BTX_PYTHON"] = os.environ.get("BTX_PYTHON") or sys.executable
    if config.max_restarts is not None:
        chosen["BTX_MAX_RESTARTS"] = str(config.max_restarts)
    if config.requeue_on_failure is not None:
        chosen["BTX_REQUEUE_ON_FAILURE"] = str(int(config.requeue_on_failure))
    return chosen


def _todos(
    jobs: Sequence[Job], submission: Submission, redo: Collection[str], *, paired: bool, here: bool, save: bool
) -> list[Todo]:
    """What is to do; with `save`, jobs of this pipeline that have no record get one. `paired`: as `check_settings`."""
    runs = submission.runs
    own = {name: value for name, value in os.environ.items() if name.startswith(("BTX_", "SBATCH_"))}
    told = {**own, **submission.environment}
    submitted = {job.name: state.submitted(runs, job.name) for job in jobs}
    known, live = submitted, dict[str, str]()
    if not here or (any(one and not one.pid for one in submitted.values()) and slurm.has_slurm()):
        known, live = _settled(jobs, runs, submitted, {job.name: line(job, told) for job in jobs})
    todos = decide(jobs, runs, known, live, told, redo)
    for todo in todos:
        one = known[todo.job.name]
        if todo.action == "join" and one is not None and one.pid and not here:
            raise UserError(f"{todo.job.name} runs as a process of this machine; wait for it, or: btx-nemo cancel")
        if save and one is not None and one is not submitted[todo.job.name]:
            state.save_submitted(runs, todo.job.name, one)
    mix = next((todo.job for todo in todos if todo.job.name == "mix"), None)
    if mix is not None and os.path.lexists(mix.out) and made_of(runs, "mix") is None:
        mix = None  # made without the pipeline, and taken as it is
    check_settings((todo.job for todo in todos if todo.action == "run"), mix, paired=paired)
    return todos


def _settled(
    jobs: Sequence[Job],
    runs: Path,
    submitted: Mapping[str, state.Submitted | None],
    lines: Mapping[str, Sequence[str]],
) -> tuple[dict[str, state.Submitted | None], dict[str, str]]:
    """What `found.jobs_of` says once no job is just ending: one that saves after a cancel must not be joined.

    Raises BtxError for one that does not end.
    """
    give_up = time.monotonic() + ENDING_SECONDS
    waiting = False
    while True:
        known, live = found.jobs_of(runs, submitted, lines)
        unfinished = [one.job for job in jobs if (one := known[job.name]) and not job.done.exists()]
        ending = ", ".join(job for job in unfinished if live.get(job) == "COMPLETING")
        if not ending:
            return known, live
        if time.monotonic() > give_up:
            raise BtxError(f"job {ending} is still ending; submit again when squeue does not show it any more")
        if not waiting:
            print(f"waiting for job {ending} to end", file=sys.stderr, flush=True)
        waiting = True
        time.sleep(1)
