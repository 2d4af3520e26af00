"""`import` and `export`: Hugging Face folder <-> Megatron torch_dist checkpoint, with no model built."""

from __future__ import annotations

from pathlib import Path

from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
from btx_nemo.checkpoints.manifest import source_facts, write_manifest
from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.checkpoints.tokenizer_files import copy_tokenizer, write_json
from btx_nemo.checkpoints.torch_dist import DistSink
from btx_nemo.errors import UserError
from btx_nemo.families.base import get_family, hf_config, to_megatron
from btx_nemo.families.source import MODEL_JSON, Source, check_tied, model_json, open_source
from btx_nemo.plan.execute import execute
from btx_nemo.plan.expr import infer
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.progress import byte_progress

DTYPES = ("float32", "bfloat16", "float16")
OVERHEAD_BYTES = 64 << 20


def import_hf(src: str | Path, out: str | Path, *, dtype: str | None = None, workers: int | None = None) -> None:
    """Hugging Face folder (dense or Mixtral) -> checkpoint folder that training starts from.

    `out` gets the torch_dist files, model.json, tokenizer/ (with the config.json it came with) and a manifest.
    `dtype` casts. Raises UserError and leaves nothing behind.
    """
    _check_dtype(dtype)
    refuse_existing(Path(out))
    source = open_source(src, "hf")
    if source.kind != "hf":
        raise UserError(f"{src}: is a Megatron checkpoint already; import takes a Hugging Face folder")
    plan = import_plan(source, dtype)
    plan.check()
    check_tied(source)
    with atomic_dir(out, plan.nbytes + OVERHEAD_BYTES) as folder:
        sink = DistSink(folder, {job.target: job.info for job in plan.jobs})
        _stream(plan, source, sink, "import", workers)
        write_json(folder / MODEL_JSON, model_json(source.config))
        copy_tokenizer(source.tokenizer, folder / "tokenizer")
        write_json(folder / "tokenizer" / "config.json", dict(source.base))
        write_manifest(folder, kind="import", **_facts(source, plan))


def export_hf(
    src: str | Path,
    out: str | Path,
    dtype: str | None = None,
    *,
    shard_size: int = 5_000_000_000,
    workers: int | None = None,
) -> None:
    """Checkpoint folder or run directory (its latest checkpoint) -> Hugging Face folder.

    `dtype` casts; None keeps what is stored. Raises UserError and leaves nothing behind.
    """
    _check_dtype(dtype)
    refuse_existing(Path(out))
    source = open_source(src, "ckpt")
    if source.kind != "megatron":
        raise UserError(f"{src}: is a Hugging Face folder already; export takes a checkpoint or a run directory")
    plan = export_plan(source, dtype)
    plan.check()
    with atomic_dir(out, plan.nbytes + OVERHEAD_BYTES) as folder:
        sink = SafetensorsSink(folder, {job.target: job.info for job in plan.jobs}, shard_size)
        _stream(plan, source, sink, "export", workers)
        copy_tokenizer(source.tokenizer, folder)
        write_json(folder / "config.json", hf_config(source.config, dtype or source.dtype, source.base))
        write_manifest(folder, kind="export", **_facts(source, plan))


def import_plan(source: Source, dtype: str | None = None) -> Plan:
    """The plan of an import: Megatron keys from Hugging Face tensors."""
    layouts = {source.name: source.reader.layout()}
    jobs = []
    for key, expr in to_megatron(source.config).items():
        info = infer(expr, layouts)
        jobs.append(Job(key, TensorInfo(info.shape, dtype or info.dtype), expr))
    return Plan(tuple(jobs), layouts, {(source.name, name): why for name, why in source.dropped.items()})


def export_plan(source: Source, dtype: str | None = None) -> Plan:
    """The plan of an export: Hugging Face tensors from Megatron keys, in the family's order."""
    layouts = {source.name: source.reader.layout()}
    expected = get_family(source.config.family).hf_layout(source.config, "float32")
    jobs = []
    for name, info in expected.items():
        stored = infer(source.table[name], layouts).dtype
        jobs.append(Job(name, TensorInfo(info.shape, dtype or stored), source.table[name]))
    return Plan(tuple(jobs), layouts, {(source.name, name): why for name, why in source.dropped.items()})


def _stream(plan: Plan, source: Source, sink: DistSink | SafetensorsSink, label: str, workers: int | None) -> None:
    try:
        with byte_progress(plan.nbytes, label) as advance:
            execute(plan, {source.name: source.reader}, sink, workers=workers, progress=advance)
        sink.close()
    finally:
        sink.abort()


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype={dtype}: unknown; known: {', '.join(DTYPES)}")


def _facts(source: Source, plan: Plan) -> dict[str, object]:
    return {
        "sources": {source.name: source_facts(source.folder, source.reader.layout())},
        "dropped": {f"{name}:{tensor}": reason for (name, tensor), reason in plan.dropped.items()},
    }
