"""Training checkpoints: what is in them, and a run that goes on from one. `saving.py` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from btx_nemo.checkpoints.dist_format import read_metadata
from btx_nemo.checkpoints.manifest import read_manifest, verify_checksums
from btx_nemo.errors import UserError
from btx_nemo.families.source import find_checkpoint
from btx_nemo.megatron.load import METADATA
from btx_nemo.megatron.platform import device
from btx_nemo.train.optimizer_state import load_optimizer_state, of_frozen_experts, sharded_optimizer_state
from btx_nemo.train.step import Trainee

LATEST = "latest"
EXTRA_STATE = "_extra_state"
T = TypeVar("T")


def latest_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint of a run directory, or None where there is none yet. Collective.

    The first rank looks: what others see of a shared file system may be older.
    """
    return on_first_rank(lambda: _find_latest(out))


def _find_latest(out: Path) -> Path | None:
    if (out / LATEST).exists():
        folder = find_checkpoint(out)
        assert folder is not None
    else:  # lost, or of a run that was killed as it saved for the first time: what has its name is complete
        complete = complete_checkpoints(out / "checkpoints")
        if not complete:
            return None
        folder = complete[-1]
    read_manifest(folder)
    return folder


def complete_checkpoints(folder: Path) -> list[Path]:
    """Those in a run's folder of checkpoints, oldest first: what is being written or removed has another name."""
    return sorted(folder.glob("step_*"))


def on_first_rank(work: Callable[[], T]) -> T:
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


def state_of(
    trainee: Trainee, progress: dict[str, Any], *, optimizer: bool, loading: bool, gather_on_first: bool = False
) -> dict[str, Any]:
    """What a checkpoint holds, as Megatron takes and fills it: tensors with their place in the whole. Collective.

    With `gather_on_first` the optimizer's state is put together on the first data-parallel rank, not on all.
    """
    metadata: dict[str, Any] = {**METADATA, "distrib_optim_fully_reshardable_mem_efficient": gather_on_first}
    model = trainee.gpt.sharded_state_dict(metadata=metadata)
    # FP8 scales are all that Transformer Engine keeps here; local layers have the same keys, and nothing in some.
    model = {key: value for key, value in model.items() if not key.endswith(EXTRA_STATE)}
    state = {"model": model, "scheduler": trainee.scheduler.state_dict(), "progress": progress}
    frozen = of_frozen_experts(trainee.optimizer, model)
    if optimizer:
        parts = sharded_optimizer_state(trainee.optimizer, model, frozen, loading=loading, metadata=metadata)
        state["optimizer_parts"] = parts
    if trainee.average is not None:
        state["averages"] = trainee.average.sharded_state(model, frozen, loading=loading)
    return state


def _refuse_foreign_pickles(folder: Path) -> None:
    """Megatron unpickles these two files as they are: first see that nothing but data is in them."""
    read_metadata(folder)
    common = folder / "common.pt"
    if common.exists():
        try:
            torch.load(common, map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"{common}: damaged, or holds more than data; remove {folder} or copy it again") from error


def load_checkpoint(folder: Path, trainee: Trainee, *, steps: int, verify: bool) -> tuple[int, dict[str, Any]]:
    """Weights, optimizer and schedule from a checkpoint saved at any layout, for a run of `steps`. Collective.

    Returns its step, and what the run remembered of the steps before. With `verify` the checksums of all files are
    compared first, each rank its share. Raises UserError on all ranks when it is damaged, or has no optimizer's state
    although there are steps to come.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    manifest = on_first_rank(lambda: read_manifest(folder))
    optimizer = manifest.get("optimizer", True)
    if not optimizer and manifest.get("step") != steps:
        raise UserError(
            f"{folder}: has weights alone (it was saved with checkpoint.optimizer=false), so that no run can go on "
            f"from it; start another out with init_from={folder}"
        )
    if verify:
        _verify(folder, manifest)
    on_first_rank(lambda: _refuse_foreign_pickles(folder))
    state = state_of(trainee, {}, optimizer=optimizer, loading=True)
    try:
        state = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_ALL)
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        raise UserError(
            f"{folder}: cannot be read ({type(error).__name__}: {str(error)[:200]}); damaged, or of another model: "
            f"remove it and put the name of the checkpoint before into {folder.parent.parent / LATEST}"
        ) from error
    missing, unexpected = trainee.gpt.load_state_dict(state["model"], strict=False)
    if unexpected or any(not key.endswith(EXTRA_STATE) for key in missing):
        raise RuntimeError(f"{folder}: missing {missing}, unexpected {unexpected}")
    trainee.scheduler.load_state_dict(state["scheduler"])
    if optimizer:
        load_optimizer_state(trainee.optimizer, state["optimizer_parts"], steps=trainee.scheduler.num_steps)
    if trainee.average is not None:
        trainee.average.load(state["averages"])
    return int(state["progress"]["step"]), state["progress"].get("watched", {})


def _verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Compares checksums, each rank its share, and tells all ranks of the first difference. Collective."""
    found: list[str | None] = [None] * dist.get_world_size()
    mine = None
    try:
        verify_checksums(folder, manifest, part=dist.get_rank(), parts=len(found))
    except UserError as error:
        mine = str(error)
    dist.all_gather_object(found, mine)
    first = next(filter(None, found), None)
    if first is not None:
        raise UserError(first)
