"""`export`: Megatron torch_dist checkpoint or run directory -> Hugging Face folder, streamed, with no model built."""

from __future__ import annotations

from pathlib import Path

from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.checkpoints.tokenizer_files import copy_tokenizer
from btx_nemo.convert.check import check_mode, check_result
from btx_nemo.convert.checkpoint import check_dtype, check_shard_size, facts, space_needed, stream
from btx_nemo.errors import UserError
from btx_nemo.families.architecture import (
    SHARED,
    Architecture,
    stored_dtype,
    write_settings,
)
from btx_nemo.families.source import Source, open_source
from btx_nemo.families.target import choose_target
from btx_nemo.plan.expr import infer, substitute
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan


def export_hf(
    src: str | Path,
    out: str | Path,
    dtype: str | None = None,
    *,
    target: str | None = None,
    allow_inexact: bool = False,
    shard_size: int = 5_000_000_000,
    workers: int | None = None,
    verify: str = "tensors",
    ema: bool = False,
) -> str:
    """Checkpoint folder or run directory (its latest checkpoint) -> Hugging Face folder.

    `dtype` casts; None keeps what is stored. `target` is a model_type; None for the source's own, or the first that
    computes the same; one that does not is refused unless `allow_inexact`. `verify` is a mode of `convert.check`.
    `ema` takes the averages of all weights that have one and says so in the manifest; everything is then in fp32 unless
    `dtype` is given, since transformers would load all in the one dtype of config.json.
    Returns which architecture was written and why, which the manifest has too, and what was verified.
    Raises UserError, or CheckFailed when the result is not the source, and leaves nothing behind.
    """
    check_mode(verify)
    check_dtype(dtype)
    check_shard_size(shard_size)
    refuse_existing(Path(out))
    dtype = dtype or ("float32" if ema else None)
    source = open_source(src, "ckpt", averaged=ema)
    if source.kind != "megatron":
        raise UserError(f"{src}: is a Hugging Face folder already; export takes a checkpoint or a run directory")
    dtype_written = dtype or source.dtype
    chosen = choose_target(
        source.config, source.base, str(src), target, allow_inexact=allow_inexact, dtype=dtype_written
    )
    architecture, written = chosen.architecture, chosen.view(source)
    plan = export_plan(written, architecture, dtype)
    plan.check()
    with atomic_dir(out, space_needed(plan, source.tokenizer)) as folder:
        sink = SafetensorsSink(folder, {job.target: job.info for job in plan.jobs}, shard_size)
        stream(plan, [source], sink, "export", workers=workers)
        copy_tokenizer(source.tokenizer, folder)
        write_settings(architecture, folder, written.config, dtype_written, source.base)
        extra = {"architecture": architecture.model_type, "chosen": chosen.chosen, **facts([source], plan)}
        if ema:
            extra["averages"] = source.averages
        write_manifest(folder, kind="export", extra=extra)
        verified = check_result(source, folder, verify, chosen)
    averages = f"; {len(source.averages)} of {len(source.reader.layout())} stored tensors are averages" if ema else ""
    return f"{chosen.chosen}{averages}; {verified}"


def export_plan(source: Source, architecture: Architecture, dtype: str | None = None) -> Plan:
    """The plan of an export: the architecture's tensors from Megatron keys, in the architecture's order."""
    layouts = {source.name: source.reader.layout()}
    jobs = []
    for name, expr in architecture.stored(source.config).items():
        value = substitute(expr, SHARED, source.table)
        info = infer(value, layouts)
        jobs.append(Job(name, TensorInfo(info.shape, stored_dtype(architecture, name, dtype, info.dtype)), value))
    dropped = {(source.name, name): why for name, why in source.dropped.items()}
    return Plan(tuple(jobs), layouts, dropped, {source.name: str(source.folder)})
