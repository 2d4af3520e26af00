"""Submitting a pipeline: to Slurm as jobs that depend on each other, or to this machine.

The work is in the scripts of `slurm/`. Here they are chained, and what need not be done again is left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from btx_nemo.config.build import build
from btx_nemo.config.domains import check_domain
from btx_nemo.config.load import load
from btx_nemo.errors import EnvironmentLacks, UserError
from btx_nemo.launch import slurm, state
from btx_nemo.launch.batches import Submission, script, submit_all
from btx_nemo.launch.config import PipelineConfig
from btx_nemo.launch.decide import Todo, decide, redone
from btx_nemo.launch.graph import Job, graph, places, spell
from btx_nemo.launch.identity import put_aside
from btx_nemo.launch.local import run_here
from btx_nemo.launch.settings import check_settings


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
    jobs = graph(config, allow_missing=allow_missing)
    at = places(config)
    environment = {"BTX_RUNS": str(at.runs), "BTX_SEED": str(at.seed), "BTX_DATA": str(at.data), **_settings(config)}
    submission = Submission(scripts_dir(), at.runs, environment, tuple(sbatch_options), allow_missing)
    here = local or not slurm.has_slurm()
    redo = redone(jobs, at.runs, redo)
    if dry_run:
        print(script(_todos(jobs, at.runs, redo), submission, here=here))
        return
    with state.submitting(at.runs):
        todos = _todos(jobs, at.runs, redo)
        state.save_pipeline(at.runs, {job.name: job.done for job in jobs})
        for name in redo:
            (out,) = (job.out for job in jobs if job.name == name)
            if os.path.lexists(out):
                print(f"{name}: put aside as {put_aside(at.runs, name, out)}")
        (at.runs / "logs").mkdir(exist_ok=True)  # Slurm fails a job at once when the folder of its log is missing
        if here:
            run_here(todos, submission, limit=config.local_jobs)
        else:
            submit_all(todos, submission)


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
    return build(PipelineConfig, load("submit", name, overrides, path), where=f"submit/{name}.yaml")


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


def _todos(jobs: Sequence[Job], runs: Path, redo: Collection[str]) -> list[Todo]:
    submitted = {job.name: state.submitted(runs, job.name) for job in jobs}
    ids = {one.job for one in submitted.values() if one and not one.pid}
    todos = decide(jobs, runs, submitted, slurm.jobs(ids) if ids and slurm.has_slurm() else {}, redo)
    check_settings(todo.job for todo in todos if todo.action == "run")
    return todos
