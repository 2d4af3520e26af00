"""Training checkpoints: Megatron's distributed checkpoint, complete or not there at all.

Layout: `out`/checkpoints/step_00000100/ and `out`/latest, which names the newest complete one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from btx_nemo.checkpoints.atomic import fsync_dir, fsync_tree, write_file
from btx_nemo.checkpoints.dist_format import read_metadata
from btx_nemo.checkpoints.manifest import read_manifest, write_manifest
from btx_nemo.checkpoints.tokenizer_files import save_tokenizer
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.source import find_checkpoint, save_model_config
from btx_nemo.megatron.compat import writer_without_manager
from btx_nemo.megatron.load import METADATA
from btx_nemo.megatron.platform import device
from btx_nemo.train.optimizer_state import load_optimizer_state, sharded_optimizer_state
from btx_nemo.train.step import Trainee

LATEST = "latest"
EXTRA_STATE = "_extra_state"
FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "inline_container.cc")
"""What the traceback of a failed write holds; the last is torch's zip writer, which does not say why."""
LITTLE = 1 << 20
"""Free bytes of a disk that is full."""
T = TypeVar("T")


def latest_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint of a run directory, or None where there is none yet. Collective.

    The first rank looks: what others see of a shared file system may be older.
    """
    return _on_first_rank(lambda: _find_latest(out))


def _find_latest(out: Path) -> Path | None:
    if not (out / LATEST).exists():
        return None
    folder = find_checkpoint(out)
    assert folder is not None
    read_manifest(folder)
    return folder


def _on_first_rank(work: Callable[[], T]) -> T:
    """The result of `work`, done by the first rank, on every rank; its UserError as well. Collective."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except UserError as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0, device=device())
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _state(trainee: Trainee, progress: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)
    model = trainee.gpt.sharded_state_dict(metadata=metadata)
    # FP8 scales are all that Transformer Engine keeps here; local layers have the same keys, and nothing in some.
    model = {key: value for key, value in model.items() if not key.endswith(EXTRA_STATE)}
    return {
        "model": model,
        "optimizer_parts": sharded_optimizer_state(trainee.optimizer, model, loading=loading, metadata=metadata),
        "scheduler": trainee.scheduler.state_dict(),
        "progress": progress,
    }


def save_checkpoint(
    out: Path,
    trainee: Trainee,
    step: int,
    model: ModelConfig,
    tokenizer: Path | None,
    keep: int,
    *,
    watched: dict[str, Any],
) -> None:
    """Writes a checkpoint and makes it `latest`; older ones beyond `keep` go. Collective.

    `watched` is what the run remembers of its steps, plain numbers and lists of them.

    It is written beside its place and renamed when all ranks are done and all bytes are on disk, so that a kill or a
    full disk at any moment leaves the previous one as it was. Raises UserError on every rank when the disk is full.
    """
    from megatron.core import dist_checkpointing

    final = out / "checkpoints" / f"step_{step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    _on_first_rank(lambda: _make_room(final, partial))
    state = _state(trainee, {"step": step, "watched": watched}, loading=False)
    with writer_without_manager(), _full_disk_named(partial):
        dist_checkpointing.save(state, str(partial), content_metadata=dict(METADATA))
    _on_first_rank(lambda: _publish(out, partial, final, step, model, tokenizer, keep))


def _make_room(final: Path, partial: Path) -> None:
    with _full_disk_named(partial):
        for leftover in (*final.parent.glob(".*.partial"), final):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)


def _publish(
    out: Path, partial: Path, final: Path, step: int, model: ModelConfig, tokenizer: Path | None, keep: int
) -> None:
    with _full_disk_named(partial):
        save_model_config(model, partial)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial / "tokenizer")
        write_manifest(partial, kind="checkpoint", extra={"step": step})
        fsync_tree(partial)
        partial.rename(final)
        fsync_dir(final.parent)
        _point_to(out, final.name)
    _prune(final, keep)


def _point_to(out: Path, name: str) -> None:
    write_file(out / LATEST, name + "\n")


def _prune(newest: Path, keep: int) -> None:
    """Removes older checkpoints beyond `keep`, and any that claims a later step: a future that was abandoned."""
    complete = sorted(newest.parent.glob("step_*"))
    later = [folder for folder in complete if folder.name > newest.name]
    earlier = [folder for folder in complete if folder.name < newest.name]
    for old in (*later, *earlier[: max(len(earlier) - max(keep, 1) + 1, 0)]):
        shutil.rmtree(old)


@contextlib.contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """Turns "no space left", however Megatron wraps it, into one line; what was written of the checkpoint goes."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        text = "".join(traceback.format_exception(error))
        # 0.19 keeps the reason to itself; so look at the disk as well, before what was written goes.
        if not any(sign in text for sign in FULL) and shutil.disk_usage(folder.parent).free > LITTLE:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"{folder.parent}: the disk or a quota is full, a checkpoint could not be saved; the previous one is as it "
            "was; free space and run the same command again"
        ) from error


def _refuse_foreign_pickles(folder: Path) -> None:
    """Megatron unpickles these two files as they are: first see that nothing but data is in them."""
    read_metadata(folder)
    common = folder / "common.pt"
    if common.exists():
        try:
            torch.load(common, map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"{common}: damaged, or holds more than data; remove {folder} or copy it again") from error


def load_checkpoint(folder: Path, trainee: Trainee) -> tuple[int, dict[str, Any]]:
    """Weights, optimizer and schedule from a checkpoint saved at any layout. Collective.

    Returns its step, and what the run remembered of the steps before.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    _on_first_rank(lambda: _refuse_foreign_pickles(folder))
    try:
        state = dist_checkpointing.load(_state(trainee, {}, loading=True), str(folder), strict=StrictHandling.RAISE_ALL)
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        raise UserError(
            f"{folder}: cannot be read ({type(error).__name__}: {str(error)[:200]}); damaged, or of another model: "
            f"remove it and put the name of the checkpoint before into {folder.parent.parent / LATEST}"
        ) from error
    missing, unexpected = trainee.gpt.load_state_dict(state["model"], strict=False)
    if unexpected or any(not key.endswith(EXTRA_STATE) for key in missing):
        raise RuntimeError(f"{folder}: missing {missing}, unexpected {unexpected}")
    trainee.scheduler.load_state_dict(state["scheduler"])
    load_optimizer_state(trainee.optimizer, state["optimizer_parts"], steps=trainee.scheduler.num_steps)
    return int(state["progress"]["step"]), state["progress"].get("watched", {})
