"""How a pipeline is doing: one table, from Slurm, the state files and what the runs write."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from btx_nemo.config.load import read_resolved
from btx_nemo.errors import UserError
from btx_nemo.launch import slurm, state
from btx_nemo.launch.logs import last_words, tail
from btx_nemo.processes import started

COLUMNS = ("stage", "state", "job", "node", "step", "loss", "tokens/s", "restarts", "time left", "note")
COLORS = {"done": "green", "running": "cyan", "failed": "red", "lost": "red"}
QUIET = ("done", "failed", "stopped", "lost", "cancelled", "waiting")
"""States in which nothing happens any more by itself."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage."""

    stage: str
    state: str
    job: str = ""
    node: str = ""
    step: str = ""
    loss: str = ""
    speed: str = ""
    restarts: str = ""
    time_left: str = ""
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """In the order of COLUMNS."""
        return (
            *(self.stage, self.state, self.job, self.node, self.step),
            *(self.loss, self.speed, self.restarts, self.time_left, self.note),
        )


def rows(runs: Path) -> list[Row]:
    """A row for every stage. Raises UserError where nothing was submitted, BtxError when Slurm does not answer."""
    stages = state.stages(runs)
    submitted = {name: state.submitted(runs, name) for name in stages}
    ids = {one.job for one in submitted.values() if one and not one.pid}
    live = slurm.jobs(ids) if ids and slurm.has_slurm() else {}
    return [_row(runs, name, done, submitted[name], live) for name, done in stages.items()]


def _row(runs: Path, name: str, done: Path, submitted: state.Submitted | None, live: Mapping[str, slurm.Live]) -> Row:
    story = state.events(runs, name)
    job = live.get(submitted.job) if submitted else None
    how = "done" if done.exists() else _state(submitted, job, story)
    note = ""
    if how == "failed" and submitted:
        note = last_words(Path(submitted.log))
    elif how == "pending" and job:
        note = job.reason
    return Row(
        stage=name,
        state=how,
        job=submitted.job if submitted else story[-1].job if story else "",
        node=job.nodes if job and job.nodes else story[-1].nodes if story else "",
        restarts=str(sum(event.what == "start" for event in story) - 1) if story else "",
        note=note,
        **_progress(runs / name, how),
    )


def _state(submitted: state.Submitted | None, job: slurm.Live | None, story: Sequence[state.Event]) -> str:
    """What a stage that is not done is doing."""
    last = story[-1].what if story else ""
    if submitted is not None and submitted.pid:
        if started(submitted.pid) == submitted.started:
            return "running"
    elif job is not None:
        if not job.ended:
            return job.state.lower()
        return {"CANCELLED": "cancelled", "COMPLETED": "lost"}.get(
            job.state, "stopped" if last == "stopped" else "failed"
        )
    # Slurm has forgotten the job, or never knew it: what its script wrote last is all there is.
    if last in ("start", "requeue"):
        return "lost" if submitted is not None else "unknown"
    return {"failed": "failed", "stopped": "stopped"}.get(last, "lost" if submitted else "waiting")


def _progress(run: Path, how: str) -> dict[str, str]:
    """Step, loss, speed and time left of a training, from its run directory."""
    record = newest_record(run)
    if record is None:
        return {}
    settings = _settings(run)
    steps, tokens = settings.get("steps"), settings.get("tokens_per_step", 0)
    shown = {"step": f"{record['step']}/{steps}" if steps else str(record["step"]), "loss": f"{record['loss']:.3f}"}
    speed = record.get("tokens_per_second")
    if isinstance(speed, (int, float)) and speed > 0:
        shown["speed"] = f"{speed:,.0f}"
        if steps and how == "running":
            shown["time_left"] = _duration((steps - record["step"]) * tokens / speed)
    return shown


def newest_record(run: Path, key: str = "loss") -> dict[str, Any] | None:
    """The last line of a run's metrics.jsonl that has `key`."""
    for line in reversed(tail(run / "metrics.jsonl")):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and key in record and isinstance(record.get("step"), int):
                return record
    return None


def _settings(run: Path) -> dict[str, int]:
    try:
        values = read_resolved(run / "resolved.yaml") or {}
        tokens = values["global_batch_size"] * values["data"]["seq_length"]
        return {"steps": int(values["steps"]), "tokens_per_step": int(tokens)}
    except (UserError, TypeError, KeyError, ValueError):
        return {}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def show_status(runs: Path, *, watch: bool = False, every: float = 2.0) -> None:
    """Prints the table; with `watch` again and again, until nothing happens any more."""
    console = Console()
    if not watch:
        _print(console, rows(runs))
        return
    if not console.is_terminal:
        while True:
            found = rows(runs)
            _print(console, found)
            if all(row.state in QUIET for row in found):
                return
            time.sleep(every)
    with Screen(console=console, auto_refresh=False) as screen:
        while True:
            found = rows(runs)
            screen.update(_table(found), refresh=True)
            if all(row.state in QUIET for row in found):
                return
            time.sleep(every)


def _print(console: Console, found: Sequence[Row]) -> None:
    if console.is_terminal:
        console.print(_table(found))
        return
    table = [COLUMNS, *(row.cells() for row in found)]  # nothing is cut or wrapped when it is piped
    widths = [max(len(cells[i]) for cells in table) for i in range(len(COLUMNS))]
    for cells in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths)).rstrip())
    sys.stdout.flush()


def _table(found: Sequence[Row]) -> Table:
    table = Table()
    for name in COLUMNS:
        table.add_column(
            name, justify="right" if name in ("step", "loss", "tokens/s", "restarts", "time left") else "left"
        )
    for row in found:
        table.add_row(
            *(Text(cell, style=COLORS.get(row.state, "") if i == 1 else "") for i, cell in enumerate(row.cells()))
        )
    return table
