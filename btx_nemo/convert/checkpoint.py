"""Finding our Megatron checkpoints and what is common to both conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.manifest import source_facts
from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.checkpoints.torch_dist import DistSink
from btx_nemo.errors import UserError
from btx_nemo.families import source as sources
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.source import Source
from btx_nemo.plan.execute import execute
from btx_nemo.plan.plan import Plan
from btx_nemo.plan.progress import byte_progress

DTYPES = ("float32", "bfloat16", "float16")
OVERHEAD_BYTES = 64 << 20
"""Room for metadata, tokenizer and the file system's own needs, when free space is checked."""


def find_checkpoint(folder: Path) -> Path:
    """A checkpoint folder itself, or the one that a run directory names in `latest`. Raises UserError for neither."""
    checkpoint = sources.find_checkpoint(folder)
    if checkpoint is None:
        raise UserError(f"{folder}: neither a checkpoint nor a run directory; give a folder that train or import wrote")
    return checkpoint


def read_model_config(checkpoint: Path) -> ModelConfig:
    """The model of a checkpoint, from its model.json. Raises UserError."""
    return sources.read_model_json(checkpoint)


def check_dtype(dtype: str | None) -> None:
    """Raise UserError for a dtype that a result cannot have."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype={dtype}: unknown; known: {', '.join(DTYPES)}")


def stream(plan: Plan, source: Source, sink: DistSink | SafetensorsSink, label: str, workers: int | None) -> None:
    """Execute a conversion's plan with progress; closes the sink, also on failure."""
    try:
        with byte_progress(plan.nbytes, label) as advance:
            execute(plan, {source.name: source.reader}, sink, workers=workers, progress=advance)
        sink.close()
    finally:
        sink.abort()


def facts(source: Source, plan: Plan) -> dict[str, Any]:
    """Where a conversion's result comes from, for its manifest."""
    return {
        "sources": {source.name: source_facts(source.folder, source.reader.layout())},
        "dropped": {f"{name}:{tensor}": reason for (name, tensor), reason in plan.dropped.items()},
    }
