"""How a pipeline is doing: one table, from Slurm, the state files and what the runs write."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from btx_nemo.config.load import read_resolved
from btx_nemo.errors import UserError
from btx_nemo.launch import slurm, state
from btx_nemo.launch.found import jobs_of
from btx_nemo.launch.logs import last_words, plain, tail

COLUMNS = ("stage", "state", "job", "node", "step", "loss", "tokens/s", "restarts", "time left", "note")
IMPORTANCE = ("stage", "state", "step", "time left", "loss", "job", "note", "restarts", "tokens/s", "node")
"""Which columns a narrow terminal still shows, first to last."""
NOTE = 20
"""Columns that a note is given at least; it goes on in further lines."""
COLORS = {"done": "green", "running": "cyan", "failed": "red", "lost": "red"}
QUIET = ("done", "failed", "stopped", "lost", "cancelled", "waiting", "unknown")
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
        cells = (
            *(self.stage, self.state, self.job, self.node, self.step),
            *(self.loss, self.speed, self.restarts, self.time_left, self.note),
        )
        return tuple(map(plain, cells))


def rows(runs: Path) -> list[Row]:
    """A row for every stage. Raises UserError where nothing was submitted, BtxError when Slurm does not answer."""
    stages = state.stages(runs)
    submitted = _submitted(runs, stages)
    stories = {name: _story(runs, name, one) for name, one in submitted.items()}
    jobs = {_job(submitted[name], stories[name]) for name in stages}
    ids = {job for job in jobs if state.ID.fullmatch(job)} - {"local"}
    live = slurm.jobs(ids) if ids and slurm.has_slurm() else {}
    return [_row(runs, name, done, submitted[name], stories[name], live) for name, done in stages.items()]


def _submitted(runs: Path, stages: Mapping[str, Path]) -> dict[str, state.Submitted | None]:
    """The last job of each stage: as it was written down, or as it is in the queue where nobody did."""
    records = {name: state.submitted(runs, name) for name in stages}
    unsure = [name for name, done in stages.items() if not done.exists() and not _here(records[name])]
    if unsure and slurm.has_slurm():
        with contextlib.suppress(UserError):  # two jobs that make the same: `submit` and `cancel` say so
            records |= jobs_of(runs, {name: records[name] for name in unsure}, {})[0]
    return records


def _here(record: state.Submitted | None) -> bool:
    return record is not None and record.pid > 0


def _story(runs: Path, name: str, submitted: state.Submitted | None) -> list[state.Event]:
    """The events of a stage's present job: the one that was submitted, or else the last that was started by hand."""
    story = state.events(runs, name)
    return [event for event in story if event.job == _job(submitted, story)]


def _job(submitted: state.Submitted | None, story: Sequence[state.Event]) -> str:
    return submitted.job if submitted else story[-1].job if story else ""


def _row(
    runs: Path,
    name: str,
    done: Path,
    submitted: state.Submitted | None,
    story: Sequence[state.Event],
    live: Mapping[str, slurm.Live],
) -> Row:
    job = live.get(_job(submitted, story))
    # A stage that is to be made again is not done, though what was made before is still there.
    queued = job is not None and not job.ended and job.state != "COMPLETING"
    busy = queued or (submitted is not None and submitted.alive)
    how = "done" if done.exists() and not busy else _state(submitted, job, story)
    note = ""
    if how == "failed" and submitted:
        note = last_words(Path(submitted.log))
    elif how == "pending" and job:
        note = job.reason
    return Row(
        stage=name,
        state=how,
        job=_job(submitted, story),
        node=job.nodes if job and job.nodes else story[-1].nodes if story else "",
        restarts=str(story[-1].restart) if story else "",
        note=note,
        **(_progress(runs / name, how) if story or not busy else {}),
    )


def _state(submitted: state.Submitted | None, job: slurm.Live | None, story: Sequence[state.Event]) -> str:
    """What a stage that is not done is doing."""
    last = story[-1].what if story else ""
    if submitted is not None and submitted.pid:
        if submitted.alive:
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
    step, steps, tokens = record["step"], settings.get("steps"), settings.get("tokens_per_step", 0)
    shown = {"step": f"{step}/{steps}" if steps else str(step)}
    if (loss := _number(record["loss"])) is not None:  # a step that was skipped has none
        shown["loss"] = f"{loss:.3f}"
    speed = _number(record.get("tokens_per_second"))
    if speed is not None and speed > 0:
        shown["speed"] = f"{speed:,.0f}"
        if steps and how == "running":
            shown["time_left"] = _duration(max(steps - step, 0) * tokens / speed)
    return shown


def _number(value: object) -> float | None:
    """A finite number, or None for whatever else a line may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def newest_record(run: Path, key: str = "loss") -> dict[str, Any] | None:
    """The last line of a run's metrics.jsonl that has `key` and a step."""
    for line in reversed(tail(run / "metrics.jsonl")):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and key in record and type(record.get("step")) is int:
                return record
    return None


def _settings(run: Path) -> dict[str, int]:
    try:
        values = read_resolved(run / "resolved.yaml") or {}
        tokens = values["global_batch_size"] * values["data"]["seq_length"]
        return {"steps": int(values["steps"]), "tokens_per_step": int(tokens)}
    except (UserError, OSError, TypeError, KeyError, ValueError, ArithmeticError):
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
            screen.update(_table(found, console.width), refresh=True)
            if all(row.state in QUIET for row in found):
                return
            time.sleep(every)


def _print(console: Console, found: Sequence[Row]) -> None:
    if console.is_terminal:
        console.print(_table(found, console.width))
        return
    table = [COLUMNS, *(row.cells() for row in found)]  # nothing is cut or wrapped when it is piped
    widths = [max(len(cells[i]) for cells in table) for i in range(len(COLUMNS))]
    for cells in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths)).rstrip())
    sys.stdout.flush()


def _table(found: Sequence[Row], width: int) -> Table:
    """The table, without the columns that have no room in `width`; nothing in it is cut, a long note is wrapped."""
    cells = dict(zip(COLUMNS, zip(COLUMNS, *(row.cells() for row in found))))
    widths = {name: max(map(cell_len, column)) for name, column in cells.items()}
    widths["note"] = min(widths["note"], NOTE)
    gap = 2 if width >= 80 else 1
    room, chosen = width + gap, []
    for name in IMPORTANCE:
        if name in ("stage", "state") or widths[name] + gap <= room:
            chosen.append(name)
            room -= widths[name] + gap
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    shown = [name for name in COLUMNS if name in chosen]
    for name in shown:
        right = name in ("step", "loss", "tokens/s", "restarts", "time left")
        fits = room >= 0 and name != "note"
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=fits)
    for number, row in enumerate(found, 1):
        styles = {"state": COLORS.get(row.state, "")}
        table.add_row(*(Text(cells[name][number], style=styles.get(name, "")) for name in shown))
    return table
