"""What the demo shows in the end: a table of losses, a picture of the routing, and the proof of the export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from btx_nemo.analysis.routing_figure import draw_routing
from btx_nemo.demo.processes import records
from btx_nemo.errors import CheckFailed

TOLERANCE = 1e-4


def report(out: Path, domains: Sequence[str], *, seconds: float) -> None:
    """Prints the table and the checks. Raises CheckFailed when the export's logits differ from Megatron's."""
    console = Console()
    rows = loss_rows(out, domains)
    console.print(loss_table(rows, domains))
    routing = _validations(out / "joint")[-1]["routing"]
    figure = out / "routing.png"
    draw_routing(
        {domain: routing[domain] for domain in domains},
        [*(domain for domain in domains), "seed"],
        figure,
        title="Validation text by domain, and the experts it is sent to (top-2, after joint training)",
    )
    console.print(f"routing per domain and layer: {figure}", highlight=False)
    difference = logit_difference(out / "joint", out / "export")
    console.print(
        f"{out / 'export'}: MixtralForCausalLM, loaded by transformers; largest difference of its logits "
        f"from Megatron's: {difference:.1e}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"took {seconds / 60:.1f} minutes", highlight=False)
    if not difference <= TOLERANCE:
        raise CheckFailed(f"{out / 'export'}: its logits differ from Megatron's by {difference:.1e}, over {TOLERANCE}")


def _validations(run: Path) -> list[dict[str, Any]]:
    return [record for record in records(run) if "valid" in record]


def loss_rows(out: Path, domains: Sequence[str]) -> list[tuple[str, list[float]]]:
    """(name, validation loss per domain) of every model of the demo, from their runs' metrics."""

    def losses(run: str, which: int) -> list[float]:
        return [_validations(out / run)[which]["valid"][domain] for domain in domains]

    rows = [("seed", losses("seed", -1))]
    rows += [(f"{domain} expert", losses(f"expert-{domain}", -1)) for domain in domains]
    rows += [("mix, before training", losses("joint", 0)), ("mix, after training", losses("joint", -1))]
    return rows


def loss_table(rows: Sequence[tuple[str, Sequence[float]]], domains: Sequence[str]) -> Table:
    """Validation loss (nats per token) per model and domain, and the mean; the best of each column is marked."""
    table = Table(title="validation loss, nats per token (lower is better, * best)")
    table.add_column("model")
    for name in (*domains, "mean"):
        table.add_column(name, justify="right")
    full = [(name, [*values, sum(values) / len(values)]) for name, values in rows]
    best = [min(values[column] for _, values in full) for column in range(len(domains) + 1)]
    for name, values in full:
        cells = [f"{value:.3f}" + ("*" if value == best[i] else " ") for i, value in enumerate(values)]
        table.add_row(name, *cells)
    return table


def logit_difference(checkpoint: Path, folder: Path) -> float:
    """Largest absolute difference between Megatron's logits of a checkpoint and transformers' of its export."""
    from btx_nemo.convert.logits import hf_logits, megatron_logits
    from btx_nemo.convert.verify import compare_logits, probe_tokens
    from btx_nemo.families.source import open_source

    tokens = probe_tokens(open_source(folder).config.vocab_size)
    ours = megatron_logits(checkpoint, tokens)
    assert ours is not None
    return compare_logits(ours, hf_logits(folder, tokens)).largest
