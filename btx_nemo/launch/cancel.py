"""Stopping the jobs of a pipeline."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from btx_nemo.errors import UserError
from btx_nemo.launch import found, slurm, state
from btx_nemo.launch.local import stop_executor


def cancel(runs: Path, stages: Sequence[str]) -> None:
    """Stops the jobs of these stages, or of all, and those that wait for them. What is trained is kept.

    Raises UserError for an unknown stage, BtxError when Slurm does not answer.
    """
    known = list(state.stages(runs))
    for name in stages:
        if name not in known:
            raise UserError(f"cancel: {name}: no such stage; known: {', '.join(known)}")
    records = {name: state.submitted(runs, name) for name in known}
    there = slurm.has_slurm()
    if there:
        records, _ = found.jobs_of(runs, records, {})  # those too that nobody wrote down
    submitted = {name: one for name, one in records.items() if one is not None}
    chosen = _with_dependents(submitted, stages or known)
    ids = {submitted[name].job for name in chosen if not submitted[name].pid}
    live = slurm.jobs(ids) if ids and there else {}
    # Without it the next stages of a local pipeline would start.
    stopped = executor = not stages and stop_executor(runs)
    # Last ones first: one that goes on without its experts must not start when they are cancelled.
    for name in reversed(chosen):
        one = submitted[name]
        if one.alive:
            if not executor:  # which passes it on
                with contextlib.suppress(ProcessLookupError):  # it ended this moment
                    os.kill(one.pid, signal.SIGTERM)
            print(f"{name}: asked to save and end")
        elif one.job in live and not live[one.job].ended:
            slurm.scancel([one.job])
            print(f"{name}: cancelled job {one.job}")
        else:
            continue
        stopped = True
    if not stopped:
        print("nothing to cancel: no job is running or waiting")


def _with_dependents(submitted: Mapping[str, state.Submitted], stages: Sequence[str]) -> list[str]:
    """The stages that have a job, and those whose job waits for theirs; in the pipeline's order."""
    chosen: set[str] = set()
    grown = {name for name in submitted if name in stages}
    while grown:
        chosen |= grown
        jobs = {submitted[name].job for name in chosen}
        grown = {name for name, one in submitted.items() if {*one.after} & jobs} - chosen
    return [name for name in submitted if name in chosen]
