"""What a run shows and keeps: a progress bar, and one JSON object a line in metrics.jsonl."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from btx_nemo.checkpoints.atomic import write_file

_BLOCKS = "▁▂▃▄▅▆▇█"


class MetricsFile:
    """metrics.jsonl: appended, and cut back to the step that a run resumes from."""

    def __init__(self, path: Path, *, resumed_at: int):
        self.path = path
        kept = [line for line in _lines(path) if _step(line) <= resumed_at] if resumed_at else []
        if path.exists():
            write_file(path, "".join(kept))

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    # A killed run may have left a last line without an end.
    return [f"{line}\n" for line in path.read_text(errors="replace").split("\n")[:-1]]


def _step(line: str) -> float:
    """The step of a record; infinite for a line that is none, as a machine that lost its power may leave."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


def load_bars(load: list[list[float]], width: int = 8) -> str:
    """Expert load as blocks, a word a layer, full height at twice the fair share; at most `width` layers."""
    words = []
    for layer in load[:width]:
        fair = 1 / len(layer)
        words.append("".join(_BLOCKS[min(int(share / (2 * fair) * 8), 7)] for share in layer))
    return " ".join(words) + (" …" if len(load) > width else "")


def routing_text(load: list[list[float]], entropy: list[float], dropped: list[float], dead: int) -> str:
    """Routing in a few words for the progress line: load, entropy as a share of undecided, what is dropped or dead."""
    mixtures = [row for row in zip(load, entropy, dropped) if any(row[0])]  # a layer may be dense
    if not mixtures:
        return ""
    load, entropy, dropped = (list(column) for column in zip(*mixtures))
    undecided = math.log(len(load[0])) or 1.0
    words = [f"load {load_bars(load)}", f"entropy {sum(entropy) / len(entropy) / undecided:.0%}"]
    words += [f"dropped {sum(dropped) / len(dropped):.1%}"] if any(dropped) else []
    words += [f"dead {dead}"] if dead else []
    return "  ".join(words)


class TrainProgress:
    """Progress on stderr: a bar on a terminal, a line now and then elsewhere; silent on all ranks but the first."""

    def __init__(self, *, total: int, done: int, name: str, tokens_per_step: int, show: bool, every: int):
        self._start, self._done_at_start = time.monotonic(), done
        self._tokens_per_step, self._every, self._show, self._name, self._total = (
            tokens_per_step,
            every,
            show,
            name,
            total,
        )
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not (show and console.is_terminal),
        )
        self._task = self._bar.add_task(name, total=total, completed=done, text="")

    def __enter__(self) -> TrainProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def tokens_per_second(self, step: int) -> float:
        """Mean speed of this process since it started training."""
        return (step - self._done_at_start) * self._tokens_per_step / max(time.monotonic() - self._start, 1e-9)

    def update(self, step: int, text: str) -> None:
        """Shows a step."""
        text = f"{text}  {self.tokens_per_second(step):,.0f} tok/s"
        self._bar.update(self._task, completed=step, text=text)
        if self._show and self._bar.disable and (step % self._every == 0 or step == self._total):
            self.say(f"{self._name} {step}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        if not self._show:
            return
        if self._bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)
