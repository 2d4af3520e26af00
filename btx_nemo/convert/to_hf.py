"""`export`: Megatron torch_dist checkpoint or run directory -> Hugging Face folder, streamed, with no model built."""

from __future__ import annotations

from pathlib import Path

from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
from btx_nemo.checkpoints.files import write_json
from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.checkpoints.tokenizer_files import copy_tokenizer
from btx_nemo.convert.checkpoint import check_dtype, check_shard_size, facts, space_needed, stream
from btx_nemo.errors import UserError
from btx_nemo.families.base import get_family, hf_config
from btx_nemo.families.source import Source, open_source
from btx_nemo.plan.expr import infer
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.routers import is_mixtral


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
    check_dtype(dtype)
    check_shard_size(shard_size)
    refuse_existing(Path(out))
    source = open_source(src, "ckpt")
    if source.kind != "megatron":
        raise UserError(f"{src}: is a Hugging Face folder already; export takes a checkpoint or a run directory")
    moe = source.config.moe
    if moe is not None and not is_mixtral(moe):
        raise UserError(
            f"{src}: Hugging Face's Mixtral cannot compute moe.router={moe.router} with {moe.options}; "
            "only top_k with the softmax over the kept logits can be exported"
        )
    plan = export_plan(source, dtype)
    plan.check()
    with atomic_dir(out, space_needed(plan, source.tokenizer)) as folder:
        sink = SafetensorsSink(folder, {job.target: job.info for job in plan.jobs}, shard_size)
        stream(plan, [source], sink, "export", workers=workers)
        copy_tokenizer(source.tokenizer, folder)
        write_json(folder / "config.json", hf_config(source.config, dtype or source.dtype, source.base))
        write_manifest(folder, kind="export", extra=facts([source], plan))


def export_plan(source: Source, dtype: str | None = None) -> Plan:
    """The plan of an export: Hugging Face tensors from Megatron keys, in the family's order."""
    layouts = {source.name: source.reader.layout()}
    expected = get_family(source.config.family).hf_layout(source.config, "float32")
    jobs = []
    for name, info in expected.items():
        stored = infer(source.table[name], layouts).dtype
        jobs.append(Job(name, TensorInfo(info.shape, dtype or stored), source.table[name]))
    dropped = {(source.name, name): why for name, why in source.dropped.items()}
    return Plan(tuple(jobs), layouts, dropped, {source.name: str(source.folder)})
