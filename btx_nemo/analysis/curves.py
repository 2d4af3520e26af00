"""`btx-nemo plot`: curves of one or several runs, from their metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from btx_nemo.errors import UserError

METRICS = "metrics.jsonl"
MOST_BYTES = 1 << 30


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
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), (int, float)):
                records.append(record)
    if not records:
        raise UserError(f"{path}: holds no record yet; wait for the first step")
    return records


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of a top-level number."""
    found = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
    return [step for step, _ in found], [value for _, value in found]


def validation(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
    """Domain -> (steps, validation losses)."""
    domains: dict[str, tuple[list[float], list[float]]] = {}
    for record in records:
        losses = record.get("valid")
        for domain, loss in losses.items() if isinstance(losses, dict) else ():
            steps, values = domains.setdefault(domain, ([], []))
            steps.append(record["step"])
            values.append(loss)
    return domains


def plot(runs: Sequence[Path], out: Path) -> None:
    """Draw training loss, validation loss per domain, gradient norm and speed of the runs. Raises UserError.

    `out` ends in .png, .svg or .pdf.
    """
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {out}: must end in .png, .svg or .pdf")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: no folder {out.parent}")
    tables = {_label(run, runs): read_metrics(run) for run in runs}
    _draw(tables, out)
    print(f"{out}: {', '.join(tables)}")


def _label(run: Path, runs: Sequence[Path]) -> str:
    """A run's folder name, or its path where another has the same."""
    names = [other.resolve().name for other in runs]
    name = run.resolve().name
    return name if names.count(name) == 1 else str(run)


def _draw(tables: Mapping[str, list[dict[str, Any]]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    domains = sorted({domain for records in tables.values() for domain in validation(records)})
    panels = [
        ("loss", "training loss, nats per token"),
        ("grad_norm", "gradient norm"),
        ("tokens_per_second", "tokens/s"),
    ]
    count = len(panels) + len(domains)
    columns = min(count, 3)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    for number, (label, records) in enumerate(tables.items()):
        style = {"color": f"C{number % 10}", "label": label}
        for axis, (key, _) in zip(axes.flat, panels, strict=False):
            axis.plot(*series(records, key), **style)
        for axis, domain in zip(axes.flat[len(panels) :], domains, strict=False):
            axis.plot(*validation(records).get(domain, ([], [])), marker=".", **style)
    titles = [title for _, title in panels] + [f"validation loss, {domain}" for domain in domains]
    for axis, title in zip(axes.flat, titles, strict=False):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.savefig(out, dpi=120)
    plt.close(figure)
