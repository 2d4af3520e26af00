"""What the conversions and the mix have in common: checks of settings, streaming, and what a manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.manifest import source_facts
from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.checkpoints.tokenizer_files import check_tokenizer
from btx_nemo.checkpoints.torch_dist_sink import DistSink
from btx_nemo.config.choice import check_choice
from btx_nemo.errors import UserError
from btx_nemo.families.source import Source
from btx_nemo.plan.execute import TensorReader, execute
from btx_nemo.plan.layout import PAGE
from btx_nemo.plan.plan import Plan
from btx_nemo.plan.progress import byte_progress

DTYPES = ("float32", "bfloat16", "float16")


def space_needed(plan: Plan, tokenizer: Path) -> int:
    """Bytes that a result takes, at most: tensors, two pages around each, the tokenizer's files, 1 MiB + 2 %.

    Raises UserError when one of the tokenizer's files cannot be copied.
    """
    return plan.nbytes + plan.nbytes // 50 + 2 * PAGE * len(plan.jobs) + (1 << 20) + check_tokenizer(tokenizer)


def check_dtype(dtype: str | None) -> None:
    """Raise UserError for a dtype that a result cannot have."""
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)


def check_shard_size(shard_size: int) -> None:
    """Raise UserError for a size that no file can have."""
    if shard_size < 1:
        raise UserError(f"shard_size={shard_size}: must be a positive number of bytes")


def stream(
    plan: Plan,
    sources: Sequence[Source],
    sink: DistSink | SafetensorsSink,
    label: str,
    *,
    workers: int | None = None,
    seed: int = 0,
    beside: Mapping[str, TensorReader] | None = None,
) -> None:
    """Execute a plan over the sources, and readers `beside` them, with progress; closes the sink, also on failure."""
    for source in sources:
        source.reader.once = True
    readers = {**{source.name: source.reader for source in sources}, **(beside or {})}
    try:
        with byte_progress(plan.nbytes, label) as advance:
            execute(plan, readers, sink, seed=seed, workers=workers, progress=advance)
        sink.close()
    finally:
        sink.abort()


def facts(sources: Sequence[Source], plan: Plan) -> dict[str, Any]:
    """Where a result comes from, for its manifest."""
    return {
        "sources": {source.name: source_facts(source.folder, source.reader.layout()) for source in sources},
        "dropped": {f"{name}:{tensor}": reason for (name, tensor), reason in plan.dropped.items()},
    }
