"""What a plan would do, as a table: for `--dry-run`, from layouts alone."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from btx_nemo.plan.execute import peak_memory_bound
from btx_nemo.plan.expr import describe
from btx_nemo.plan.plan import Plan
from btx_nemo.plan.progress import human_bytes


def plan_lines(plan: Plan) -> list[str]:
    """One line per target: name, shape, dtype, bytes, expression."""
    return [
        f"{job.target}  {list(job.info.shape)} {job.info.dtype}  {human_bytes(job.info.nbytes)}  = {describe(job.expr)}"
        for job in plan.jobs
    ]


def summary_lines(plan: Plan, workers: int) -> list[str]:
    """Totals and the bound on memory."""
    lines = [
        f"{len(plan.jobs)} tensors, {human_bytes(plan.nbytes)} to write, "
        f"peak memory at most {human_bytes(peak_memory_bound(plan, workers))} of tensors at a time ({workers} workers)"
    ]
    if plan.statistics:
        names = list(plan.statistics)
        shown = names if len(names) <= 4 else [*names[:3], f"... {len(names) - 3} more"]
        lines.append(f"measured before anything is written, in a pass of its own: {', '.join(shown)}")
    for (source, name), reason in plan.dropped.items():
        lines.append(f"dropped: {source}:{name} ({reason})")
    return lines


def print_plan(plan: Plan, workers: int, console: Console | None = None) -> None:
    """A table on a terminal, plain lines elsewhere, so that nothing is cut when it is piped."""
    console = console or Console()
    if not console.is_terminal:
        for line in [*plan_lines(plan), *summary_lines(plan, workers)]:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        return
    table = Table("target", "shape", "dtype", "bytes", "expression")
    for job in plan.jobs:
        shape = "x".join(map(str, job.info.shape))
        cells = (job.target, shape, job.info.dtype, human_bytes(job.info.nbytes), describe(job.expr))
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    for line in summary_lines(plan, workers):
        console.print(line, markup=False, highlight=False)
