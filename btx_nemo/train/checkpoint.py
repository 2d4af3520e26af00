"""Training checkpoints: Megatron's distributed checkpoint, complete or not there at all.

Layout: `out`/checkpoints/step_00000100/ and `out`/latest, which names the newest complete one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from btx_nemo.checkpoints.atomic import fsync_dir, fsync_tree, write_file
from btx_nemo.checkpoints.manifest import read_manifest, write_manifest
from btx_nemo.checkpoints.tokenizer_files import save_tokenizer
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.source import find_checkpoint, save_model_config
from btx_nemo.megatron.compat import writer_without_manager
from btx_nemo.megatron.load import METADATA
from btx_nemo.train.optimizer_state import load_optimizer_state, sharded_optimizer_state
from btx_nemo.train.step import Trainee

LATEST = "latest"


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    step: int
    """Optimizer steps taken."""


def latest_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint of a run directory, or None where there is none yet."""
    if not (out / LATEST).exists():
        return None
    folder = find_checkpoint(out)
    assert folder is not None
    read_manifest(folder)
    return folder


def _state(trainee: Trainee, progress: Progress, *, loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)
    model = trainee.gpt.sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": sharded_optimizer_state(trainee.optimizer, model, loading=loading, metadata=metadata),
        "scheduler": trainee.scheduler.state_dict(),
        "progress": {"step": progress.step},
    }


def save_checkpoint(
    out: Path, trainee: Trainee, progress: Progress, model: ModelConfig, tokenizer: Path | None, keep: int
) -> Path:
    """Writes a checkpoint and makes it `latest`; older ones beyond `keep` go. Collective.

    It is written beside its place and renamed when all ranks are done and all bytes are on disk, so that a kill or a
    full disk at any moment leaves the previous one as it was.
    """
    from megatron.core import dist_checkpointing

    final = out / "checkpoints" / f"step_{progress.step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    first = dist.get_rank() == 0
    if first:
        for leftover in (*final.parent.glob(".*.partial"), final):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(trainee, progress, loading=False)
    with writer_without_manager():
        dist_checkpointing.save(state, str(partial), content_metadata=dict(METADATA))
    dist.barrier()
    if first:
        save_model_config(model, partial)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial / "tokenizer")
        write_manifest(partial, kind="checkpoint", extra={"step": progress.step})
        fsync_tree(partial)
        partial.rename(final)
        fsync_dir(final.parent)
        _point_to(out, final.name)
        _prune(out, keep)
    dist.barrier()
    return final


def _point_to(out: Path, name: str) -> None:
    write_file(out / LATEST, name + "\n")


def _prune(out: Path, keep: int) -> None:
    complete = sorted((out / "checkpoints").glob("step_*"))
    for old in complete[: -max(keep, 1)]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, trainee: Trainee) -> Progress:
    """Weights, optimizer and schedule from a checkpoint saved at any layout. Collective."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    state = dist_checkpointing.load(
        _state(trainee, Progress(step=0), loading=True), str(folder), strict=StrictHandling.RAISE_ALL
    )
    trainee.gpt.load_state_dict(state["model"])
    trainee.scheduler.load_state_dict(state["scheduler"])
    load_optimizer_state(trainee.optimizer, state["optimizer"], steps=trainee.scheduler.num_steps)
    return Progress(step=int(state["progress"]["step"]))
