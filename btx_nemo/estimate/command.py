"""`btx-nemo plan`: the tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.errors import UserError
from btx_nemo.estimate.arguments import AXES
from btx_nemo.estimate.communication import Communication, communication
from btx_nemo.estimate.memory import ITEMSIZE, Setup, memory
from btx_nemo.estimate.suggest import Candidate, candidates, flops, setup_of, suggest
from btx_nemo.families.architecture import read_config
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.source import find_checkpoint, read_model_json
from btx_nemo.plan.progress import human_bytes

MOST = 1 << 24
"""Of ranks, tokens and sequences: above any that there are, and few enough to try every divisor."""


def plan(
    folder: Path,
    *,
    given: dict[str, int],
    gpus: int | None,
    recompute: str | None,
    memory_gib: float | None,
    step: Mapping[str, Any],
) -> None:
    """Print what a layout needs, or, with `memory_gib`, layouts that fit. Reads settings alone. Raises UserError.

    `given` are axes of the layout: others are 1, or, with `memory_gib`, looked for; so is `recompute`. `step` is the
    rest of what `setup_of` takes.
    """
    model, layout = model_of(folder), LayoutConfig(**given)
    ranks = layout.tp * layout.pp * layout.cp * layout.ep * layout.etp if gpus is None else gpus
    _check(ranks, memory_gib, step)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a pipe has no width; its columns are not to be cut
    if memory_gib is not None:
        setups = candidates(model, ranks, given=given, **step)
        recomputes = (recompute,) if recompute else ("none", "full")
        console.print(_suggestions(suggest(model, setups, int(memory_gib * 2**30), recomputes=recomputes), memory_gib))
        return
    setup = setup_of(model, layout, ranks, recompute=recompute or "none", **step)
    console.print(_stages(model, setup))
    saving = max(memory(model, setup, stage).saving for stage in range(layout.pp))
    console.print(f"a save takes {human_bytes(saving)} more, of the host, at most")
    console.print(_sent(communication(model, setup)))
    tokens = step["global_batch_size"] * setup.seq_length
    console.print(f"{flops(model, setup.seq_length) * tokens:.3g} FLOP a step of {tokens:,} tokens")


def _check(ranks: int, memory_gib: float | None, step: Mapping[str, Any]) -> None:
    if step["precision"] not in ITEMSIZE:
        raise UserError(f"--precision {step['precision']}: unknown; known: {', '.join(ITEMSIZE)}")
    counts = {name: step[name] for name in ("seq_length", "micro_batch_size", "global_batch_size")}
    for name, value in {"gpus": ranks, **counts}.items():
        option = "--" + name.replace("_", "-")
        if value < 1:
            raise UserError(f"{option} {value}: must be 1 or more")
        if value > MOST:
            raise UserError(f"{option}: must be at most {MOST}")
    if memory_gib is not None and not 0 < memory_gib <= MOST:
        raise UserError(f"--memory-gib {memory_gib:g}: must be a positive number, at most {MOST}")
    if not 0 <= step["offload"] <= 1:
        raise UserError(f"--offload {step['offload']:g}: must be a fraction between 0 and 1")


def model_of(folder: Path) -> ModelConfig:
    """The architecture of a Hugging Face folder, a checkpoint or a run; its weights need not be there."""
    checkpoint = find_checkpoint(folder) if folder.is_dir() else None
    return read_model_json(checkpoint) if checkpoint else read_config(folder)


def axes(layout: LayoutConfig) -> str:
    """The layout in a few words: the axes that are used, and always tp, pp and ep."""
    named = {name: getattr(layout, name) for name in AXES}
    return " ".join(f"{name}={size}" for name, size in named.items() if size > 1 or name in ("tp", "pp", "ep"))


def _stages(model: ModelConfig, setup: Setup) -> Table:
    layout = setup.layout
    table = Table(
        title=f"a rank of {axes(layout)}, {setup.ranks} ranks, {setup.precision}, "
        f"{setup.seq_length} tokens, micro-batch {setup.micro_batch_size}, recompute {setup.recompute}"
    )
    sizes = ("weights", "gradients", "optimizer", "activations", "total", *(("host",) if setup.offload else ()))
    for column in ("stage", "parameters", *sizes):
        table.add_column(column, justify="right", overflow="fold")
    for stage in range(layout.pp):
        found = memory(model, setup, stage)
        parts = (getattr(found, name) for name in sizes)
        table.add_row(str(stage), f"{found.parameters:,}", *map(human_bytes, parts))
    return table


def _sent(sent: Communication) -> Table:
    table = Table(title="sent by a rank in a step, at most")
    for column in ("tensor", "context", "expert", "pipeline", "data"):
        table.add_column(column, justify="right")
    table.add_row(*map(human_bytes, (sent.tensor, sent.context, sent.expert, sent.pipeline, sent.data)))
    return table


def _suggestions(found: list[Candidate], memory_gib: float) -> Table:
    table = Table(title=f"layouts that fit into {memory_gib:g} GiB, the fastest by estimate first")
    for column in ("layout", "dp", "recompute", "memory a rank", "of the host, at a save", "sent a step"):
        table.add_column(column, justify="right", overflow="fold")
    for candidate in found:
        setup = candidate.setup
        table.add_row(
            axes(setup.layout),
            str(setup.dp),
            setup.recompute,
            human_bytes(candidate.memory.total),
            human_bytes(candidate.memory.host + candidate.memory.saving),
            human_bytes(candidate.communication.total),
        )
    return table
