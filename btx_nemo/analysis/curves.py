"""`btx-nemo plot`: curves of one or several runs, from their metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from btx_nemo.errors import UserError

METRICS = "metrics.jsonl"
MOST_BYTES = 1 << 30
MOST_CURVES = 48
"""Panels of a figure: its time grows faster than their number."""
MOST = 1e40
"""Above any number in single precision. Ticks of far larger ones overflow."""
Series = tuple[list[float], list[float]]
"""(steps, values)"""
SINGLE = {
    "loss": "training loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens/s",
    "flops_utilization": "FLOPs utilisation",
    "memory_bytes": "memory of the first rank",
}
SEVERAL = {"valid": "validation loss", "domain_loss": "training loss by domain", "router_losses": "router loss"}
"""Keys of metrics.jsonl -> what their curves are called. Losses are in nats per token."""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run directory, in order. Raises UserError where there are none.

    A line that is no record, as a killed run may leave at the end, is passed over.
    """
    path = run / METRICS
    if not path.is_file():
        raise UserError(f"{run}: no {METRICS}; give the folder that a training run writes (its out)")
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path}: larger than {MOST_BYTES} bytes; is it the metrics of a run?")
    records = []
    with path.open(errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and _drawable(record.get("step")):
                records.append(record)
    if not records:
        raise UserError(f"{path}: holds no record yet; wait for the first step")
    return records


def _drawable(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -MOST <= value <= MOST


def series(records: Sequence[Mapping[str, Any]], key: str) -> Series:
    """(steps, values) of a top-level number."""
    found = [(r["step"], r[key]) for r in records if _drawable(r.get(key))]
    return [step for step, _ in found], [value for _, value in found]


def by_name(records: Sequence[Mapping[str, Any]], key: str) -> dict[str, Series]:
    """Name -> (steps, values) of a table of numbers by name, such as `valid`; of a list, by layer, the mean."""
    found: dict[str, Series] = {}
    for record in records:
        table = record.get(key)
        for name, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, list) and value and all(map(_drawable, value)):
                value = sum(value) / len(value)
            if _drawable(value):
                steps, values = found.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return found


def curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Title -> (steps, values) of all that a run's records have a curve of."""
    single = {title: series(records, key) for key, title in SINGLE.items()}
    several = {
        f"{title}, {name}": found
        for key, title in SEVERAL.items()
        for name, found in sorted(by_name(records, key).items())
    }
    return {title: found for title, found in {**single, **several}.items() if found[0]}


def plot(runs: Sequence[Path], out: Path) -> None:
    """Draw all that the runs have a curve of: losses, gradient norm, speed, utilisation, memory. Raises UserError.

    What is no number that can be drawn is left out, and so are curves beyond MOST_CURVES, which are told. `out` ends in
    .png, .svg or .pdf.
    """
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {out}: must end in .png, .svg or .pdf")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: no folder {out.parent}")
    tables = {_label(run, runs): read_metrics(run) for run in runs}
    found = {label: curves(records) for label, records in tables.items()}
    titles = list(dict.fromkeys(title for run in found.values() for title in run))
    titles.sort(key=lambda title: ([*SINGLE.values(), *SEVERAL.values()].index(title.split(",")[0]), title))
    if not titles:
        raise UserError(f"{', '.join(map(str, runs))}: {METRICS} holds no number to draw; wait for the first step")
    _draw(found, titles[:MOST_CURVES], out)
    print(f"{out}: {', '.join(tables)}")
    if len(titles) > MOST_CURVES:
        print(f"left out: {len(titles) - MOST_CURVES} of {len(titles)} curves, from {titles[MOST_CURVES]!r} on")


def _label(run: Path, runs: Sequence[Path]) -> str:
    """A run's folder name, or its path where another has the same."""
    names = [other.resolve().name for other in runs]
    name = run.resolve().name
    return name if names.count(name) == 1 else str(run)


def _draw(runs: Mapping[str, Mapping[str, Series]], titles: Sequence[str], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(titles), 3)
    rows = -(-len(titles) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(titles) :]:
        axis.set_axis_off()
    for axis, title in zip(axes.flat, titles, strict=False):
        for number, (label, run) in enumerate(runs.items()):
            marker = "." if title.startswith(SEVERAL["valid"]) else None
            axis.plot(*run.get(title, ([], [])), color=f"C{number % 10}", label=label, marker=marker)
        axis.set_title(title, fontsize=10, parse_math=False)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.savefig(out, dpi=120)
    plt.close(figure)
