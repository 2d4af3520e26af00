"""The jobs of a pipeline in Slurm's queue, those too that no file of its state knows.

A `submit` that dies between sbatch and its record leaves such a job, and so does a printed script. A job belongs to a
runs folder by where its log goes, and to a stage by its name. Its comment has a digest of how it was submitted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from btx_nemo.errors import UserError
from btx_nemo.launch import slurm
from btx_nemo.launch.state import Submitted

ARRAY = "btx-experts"
"""Name of an array of experts."""


def job_name(stage: str) -> str:
    """Of a stage that has a job for itself."""
    return f"btx-{stage}"


def logs(runs: Path) -> str:
    """Where the logs of jobs are, as sbatch is told: in a log's name Slurm replaces what follows a percent sign."""
    return f"{runs}/logs/".replace("%", "%%")


def comment(line: Sequence[str]) -> str:
    """What a job's comment says of how it was submitted; the same for all tasks of an array."""
    common = [line[0], *line[2:]] if line[0] == "train_expert.sh" else list(line)
    return f"btx-nemo:{hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]}"


def jobs_of(
    runs: Path, records: Mapping[str, Submitted | None], lines: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Submitted | None], dict[str, str]]:
    """A record for each stage that has one or has a job in the queue, and the states of those jobs by their ids.

    `lines` says how a stage would be submitted now. The `line` of a record that is made here is that or empty: it is
    known only where it is the same. Raises UserError where two jobs make the same, BtxError when Slurm is silent.
    """
    known = dict(records)
    queue = slurm.named([ARRAY, *map(job_name, records)])
    live = {job.job: job.state for job in queue if any(_is(job, one) for one in records.values())}
    for job in queue:
        stage = _stage(job)
        if job.job in live or stage not in records or not job.log.startswith((logs(runs), f"{runs}/logs/")):
            continue
        one = known[stage]
        if one is not None and one.job in live:
            raise UserError(
                f"jobs {one.job} and {job.job} both make {stage} in {runs}; "
                f"cancel one, e.g. scancel {job.job}, and try again"
            )
        line = list(lines.get(stage, ()))
        same = bool(line) and job.comment == comment(line)
        log = f"{runs}/logs/{job.name}_{job.job}.out"
        known[stage] = Submitted(job=job.job, line=line if same else [], after=job.after, log=log)
        live[job.job] = job.state
    return known, live


def _is(job: slurm.Named, record: Submitted | None) -> bool:
    """Whether a record means this job, and not another that came by its id later."""
    if record is None or record.pid or record.job != job.job:
        return False
    log = Path(record.log)
    return log.name == f"{job.name}_{job.job}.out" and job.log.startswith((logs(log.parent.parent), f"{log.parent}/"))


def _stage(job: slurm.Named) -> str:
    """What a job makes; empty where that cannot be known."""
    if job.name != ARRAY:
        return job.name.removeprefix("btx-")
    task = job.job.partition("_")[2]
    words = job.command[1:]
    for number, word in enumerate(job.command):  # the path of the script may have spaces in it
        if word.endswith("/train_expert.sh"):
            words = job.command[number + 1 :]
    return f"expert-{words[int(task)]}" if task and int(task) < len(words) else ""
