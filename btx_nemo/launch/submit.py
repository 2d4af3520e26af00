"""The pipeline as jobs: the experts in parallel, then the mix with its joint training, then the export.

The work is in the scripts of `slurm/`; here they are chained. What is finished is left out, the scripts decide
themselves what a rerun has to do, and the state of a pipeline is nothing but the files under its runs folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.config.domains import check_domain
from btx_nemo.errors import EnvironmentLacks, UserError
from btx_nemo.launch.local import run_here

STAGES = ("expert", "mix", "export")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One script to run: its name in the queue, its arguments, and the jobs that must have succeeded before."""

    name: str
    script: Path
    args: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The script and its arguments, as `sbatch` or `bash` take them."""
        return [str(self.script), *self.args]


def submit(
    domains: Sequence[str],
    *,
    sbatch_options: Sequence[str] = (),
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    runs_dir: Path | str | None = None,
    local: bool = False,
) -> None:
    """Submits one expert per domain, the mix after all of them, and the export after the mix.

    Without Slurm, or with `local`, the same scripts run here one after the other and the first that
    fails ends it. An override goes to the experts' and the joint training; `expert:K=V`, `mix:K=V` and `export:K=V`
    go to one stage (`mix:layout.ep=2`). With `dry_run` a shell script is printed that would do the same.

    Raises UserError for no domain, a bad or repeated domain and what sbatch refuses (nothing stays submitted then),
    EnvironmentLacks where the scripts are missing, and for a script that fails here the error of its exit status.
    """
    runs = Path(runs_dir or os.environ.get("BTX_RUNS") or "runs").resolve()
    jobs = plan(domains, runs=runs, scripts=scripts_dir(), overrides=overrides)
    environment = {"BTX_RUNS": str(runs), "BTX_PYTHON": os.environ.get("BTX_PYTHON") or sys.executable}
    here = local or not has_slurm()
    if dry_run:
        print(_local_script(jobs, environment) if here else _sbatch_script(jobs, environment, runs, sbatch_options))
        return
    if not jobs:
        print(f"nothing to do: {runs / 'export'} is there")
        return
    if here:
        for job in jobs:
            run_here(job.name, job.command, environment)
        _print_table([(job.name, "done", "") for job in jobs])
    else:
        _submit_all(jobs, environment, runs, sbatch_options)


def has_slurm() -> bool:
    """Whether `sbatch` is there and configured: Slurm's client without a slurm.conf fails at everything."""
    return (
        shutil.which("sbatch") is not None
        and not subprocess.run(["sbatch", "--version"], capture_output=True).returncode
    )


def scripts_dir() -> Path:
    """The `slurm/` of this installation: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "slurm", package.parent / "slurm"):
        if (candidate / "train_expert.sh").is_file():
            return candidate
    raise EnvironmentLacks(f"no slurm/ scripts in or beside {package}; install btx-nemo again")


def plan(domains: Sequence[str], *, runs: Path, scripts: Path, overrides: Sequence[str] = ()) -> list[Job]:
    """The jobs that are not done yet, each after those it depends on. Reads only what exists under `runs`."""
    _check_domains(domains)
    per_stage = {stage: _overrides_of(stage, overrides) for stage in STAGES}
    jobs = [
        Job(name=f"btx-expert-{domain}", script=scripts / "train_expert.sh", args=(domain, *per_stage["expert"]))
        for domain in domains
        if not (runs / f"expert-{domain}" / "DONE").exists()
    ]
    if not (runs / "joint" / "DONE").exists() or jobs:
        tail = ("--", *per_stage["mix"]) if per_stage["mix"] else ()
        after = tuple(job.name for job in jobs)
        jobs.append(Job(name="btx-mix", script=scripts / "mix.sh", args=(*domains, *tail), after=after))
    if not (runs / "export").exists() or jobs:
        after = tuple(job.name for job in jobs if job.name == "btx-mix")
        jobs.append(Job(name="btx-export", script=scripts / "export.sh", args=per_stage["export"], after=after))
    return jobs


def _check_domains(domains: Sequence[str]) -> None:
    if not domains:
        raise UserError("submit: no domain; name at least one, e.g. btx-nemo submit math code prose")
    for domain in domains:
        check_domain(domain, f"submit: domain {domain!r}")
        if list(domains).count(domain) > 1:
            raise UserError(f"submit: domain {domain!r} is named twice; name it once")


def _overrides_of(stage: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides of one stage: `stage:K=V` without its prefix, and for the trainings the plain ones too."""
    chosen = []
    for override in overrides:
        prefix, colon, rest = override.partition(":")
        if colon and prefix in STAGES:
            if prefix == stage:
                chosen.append(rest)
        elif stage != "export":
            chosen.append(override)
    return tuple(chosen)


def _sbatch_line(job: Job, runs: Path, options: Sequence[str]) -> list[str]:
    """sbatch and all it gets but the dependency."""
    log = runs / "logs" / "%x_%j.out"
    # --export=ALL: a site's SBATCH_EXPORT=NONE would drop BTX_RUNS.
    fixed = ["--parsable", "--export=ALL", f"--job-name={job.name}", f"--output={log}"]
    return ["sbatch", *fixed, *options, *job.command]


def _dependency(ids: Sequence[str]) -> list[str]:
    """Options that hold a job back until all of `ids` succeeded, and drop it when one of them failed."""
    return [f"--dependency=afterok:{':'.join(ids)}", "--kill-on-invalid-dep=yes"] if ids else []


def _exports(environment: dict[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def _sbatch_script(jobs: Sequence[Job], environment: dict[str, str], runs: Path, options: Sequence[str]) -> str:
    """A shell script that submits `jobs`, each id kept in a variable for those that wait for it."""
    lines = ["set -e", *_exports(environment), f"mkdir -p {shlex.quote(str(runs / 'logs'))}"]
    variable: dict[str, str] = {}
    for job in jobs:
        sbatch, *rest = _sbatch_line(job, runs, options)
        waits = [o if ":" not in o else f'"{o}"' for o in _dependency([f"${variable[a]}" for a in job.after])]
        variable[job.name] = f"job{len(variable) + 1}"
        lines.append(f"{variable[job.name]}=$({' '.join([sbatch, *waits, shlex.join(rest)])})")
        lines.append(f'echo "{job.name} ${variable[job.name]}"')
    return "\n".join(lines)


def _local_script(jobs: Sequence[Job], environment: dict[str, str]) -> str:
    return "\n".join(["set -e", *_exports(environment), *(shlex.join(["bash", *job.command]) for job in jobs)])


def _submit_all(jobs: Sequence[Job], environment: dict[str, str], runs: Path, options: Sequence[str]) -> None:
    # Slurm fails a job at once when the folder of its log is missing.
    (runs / "logs").mkdir(parents=True, exist_ok=True)
    ids: dict[str, str] = {}
    for job in jobs:
        sbatch, *rest = _sbatch_line(job, runs, options)
        line = [sbatch, *_dependency([ids[a] for a in job.after]), *rest]
        result = subprocess.run(line, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            if ids:
                subprocess.run(["scancel", *ids.values()], check=False)
            reason = " ".join(result.stderr.split())
            raise UserError(f"submit: sbatch refused {job.name}: {reason}; nothing stays submitted")
        ids[job.name] = result.stdout.strip().partition(";")[0]  # "id;cluster" in a federation
    rows = [(job.name, ids[job.name], str(runs / "logs" / f"{job.name}_{ids[job.name]}.out")) for job in jobs]
    _print_table(rows)


def _print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    width = max(len(row[0]) for row in rows)
    for name, state, log in rows:
        print(f"{name:<{width}}  {state:>8}  {log}".rstrip())
