"""`import`: Hugging Face folder -> Megatron torch_dist checkpoint, streamed, with no model built."""

from __future__ import annotations

from pathlib import Path

from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.checkpoints.respelled import SPELLINGS, experts_apart
from btx_nemo.checkpoints.tokenizer_files import save_tokenizer
from btx_nemo.checkpoints.torch_dist_sink import DistSink
from btx_nemo.config.choice import check_choice
from btx_nemo.convert.check import check_mode, check_result
from btx_nemo.convert.checkpoint import check_dtype, facts, space_needed, stream
from btx_nemo.errors import UserError
from btx_nemo.families.base import to_megatron
from btx_nemo.families.source import Source, check_tied, open_source, save_model_config
from btx_nemo.plan.expr import infer, substitute
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan


def import_hf(
    src: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    workers: int | None = None,
    verify: str = "tensors",
    allow_bin: bool = False,
    experts: str | None = None,
) -> str:
    """Hugging Face folder, dense or a mixture -> checkpoint folder that training starts from.

    `out` gets the torch_dist files, model.json, tokenizer/ (with the config.json it came with) and a manifest.
    `dtype` casts; `allow_bin` lets pytorch_model.bin be read. `experts` is a spelling of `checkpoints.respelled`
    (None: `stacked`); where it is given, `src` may also be a checkpoint or a run directory, whose weights are spelled
    anew. `verify` is a mode of `convert.check`; returns what was verified, in one line.
    Raises UserError, or CheckFailed when the result is not the source, and leaves nothing behind.
    """
    check_mode(verify)
    check_dtype(dtype)
    if experts is not None:
        check_choice("experts", experts, tuple(SPELLINGS))
    refuse_existing(Path(out))
    source = open_source(src, "hf", allow_bin=allow_bin)
    if source.kind != "hf" and experts is None:
        raise UserError(
            f"{src}: is a Megatron checkpoint already; import takes a Hugging Face folder, or experts=stacked or apart "
            "to spell the checkpoint's keys anew"
        )
    spelling = experts or "stacked"
    plan = import_plan(source, dtype, spelling)
    plan.check()
    check_tied(source)
    with atomic_dir(out, space_needed(plan, source.tokenizer)) as folder:
        sink = DistSink(folder, {job.target: job.info for job in plan.jobs}, spelling=spelling)
        stream(plan, [source], sink, "import", workers=workers)
        save_model_config(source.config, folder)
        save_tokenizer(source.tokenizer, folder / "tokenizer")
        write_manifest(folder, kind="import", extra=facts([source], plan))
        return check_result(source, folder, verify)


def import_plan(source: Source, dtype: str | None = None, experts: str = "stacked") -> Plan:
    """The plan of an import: Megatron keys from Hugging Face tensors, or from those of a checkpoint."""
    layouts = {source.name: source.reader.layout()}
    table = {
        key: substitute(shared, source.name, source.table)
        for key, shared in to_megatron(source.config, source.name).items()
    }
    if experts == "apart":
        table = experts_apart(table, {key: infer(expr, layouts) for key, expr in table.items()})
    jobs = []
    for key, expr in table.items():
        info = infer(expr, layouts)
        jobs.append(Job(key, TensorInfo(info.shape, dtype or info.dtype), expr))
    dropped = {(source.name, name): why for name, why in source.dropped.items()}
    return Plan(tuple(jobs), layouts, dropped, {source.name: str(source.folder)})
