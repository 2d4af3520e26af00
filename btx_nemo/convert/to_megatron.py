"""`import`: Hugging Face folder -> Megatron torch_dist checkpoint, streamed, with no model built."""

from __future__ import annotations

from pathlib import Path

from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.checkpoints.tokenizer_files import save_tokenizer
from btx_nemo.checkpoints.torch_dist import DistSink
from btx_nemo.convert.checkpoint import check_dtype, facts, space_needed, stream
from btx_nemo.errors import UserError
from btx_nemo.families.base import to_megatron
from btx_nemo.families.source import Source, check_tied, open_source, save_model_config
from btx_nemo.plan.expr import infer, substitute
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan


def import_hf(src: str | Path, out: str | Path, *, dtype: str | None = None, workers: int | None = None) -> None:
    """Hugging Face folder (dense or Mixtral) -> checkpoint folder that training starts from.

    `out` gets the torch_dist files, model.json, tokenizer/ (with the config.json it came with) and a manifest.
    `dtype` casts. Raises UserError and leaves nothing behind.
    """
    check_dtype(dtype)
    refuse_existing(Path(out))
    source = open_source(src, "hf")
    if source.kind != "hf":
        raise UserError(f"{src}: is a Megatron checkpoint already; import takes a Hugging Face folder")
    plan = import_plan(source, dtype)
    plan.check()
    check_tied(source)
    with atomic_dir(out, space_needed(plan, source.tokenizer)) as folder:
        sink = DistSink(folder, {job.target: job.info for job in plan.jobs})
        stream(plan, [source], sink, "import", workers=workers)
        save_model_config(source.config, folder)
        save_tokenizer(source.tokenizer, folder / "tokenizer")
        write_manifest(folder, kind="import", extra=facts([source], plan))


def import_plan(source: Source, dtype: str | None = None) -> Plan:
    """The plan of an import: Megatron keys from Hugging Face tensors."""
    layouts = {source.name: source.reader.layout()}
    jobs = []
    for key, shared in to_megatron(source.config, source.name).items():
        expr = substitute(shared, source.name, source.table)
        info = infer(expr, layouts)
        jobs.append(Job(key, TensorInfo(info.shape, dtype or info.dtype), expr))
    dropped = {(source.name, name): why for name, why in source.dropped.items()}
    return Plan(tuple(jobs), layouts, dropped, {source.name: str(source.folder)})
