"""Saving checkpoints: complete or not there at all, in the background where asked.

Layout: `out`/checkpoints/step_00000100/ and `out`/latest, which names the newest complete one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from btx_nemo.checkpoints.atomic import FULL, TEMPORARY, fsync_dir, fsync_tree, hide, write_file
from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.checkpoints.tokenizer_files import save_tokenizer
from btx_nemo.config.schema import CheckpointConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.source import save_model_config
from btx_nemo.megatron.compat import finish_save, planned_save
from btx_nemo.megatron.load import METADATA
from btx_nemo.train.checkpoint import LATEST, complete_checkpoints, on_first_rank, state_of
from btx_nemo.train.step import Trainee
from btx_nemo.train.writer import Handed, Writer

SIGNS = tuple(os.strerror(number) for number in FULL)
"""What the traceback of a failed write holds, where the disk is full and whoever failed says so."""
LITTLE = 1 << 20
"""Bytes that a disk which is full has no room for."""


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written."""

    step: int
    partial: Path
    optimizer: bool
    request: Any
    writer: Writer


class Saver:
    """Saves a run's checkpoints, one at a time. All methods but `writing` and `abandon` are collective."""

    def __init__(self, out: Path, config: CheckpointConfig, model: ModelConfig, tokenizer: Path | None):
        self.out, self.config, self.model, self.tokenizer = out, config, model, tokenizer
        self._pending: _Pending | None = None

    def save(self, trainee: Trainee, progress: dict[str, Any], *, last: bool, wait: bool) -> None:
        """Writes a checkpoint of step progress["step"], and makes it `latest`; older ones beyond `keep` go.

        It is written beside its place and renamed when all ranks are done and all bytes are on disk, so that a kill or
        a full disk at any moment leaves the previous one as it was. That is waited for with `wait`, or where nothing
        is asynchronous; else `poll` sees to it. The run's `last` has no optimizer where the configuration says so.
        `progress` holds plain numbers and lists of them. Raises UserError on every rank when the disk is full.
        """
        self.finish()
        optimizer = self.config.optimizer or not last
        partial = on_first_rank(lambda: self._make_room(progress["step"]))
        first = self.config.gather_on_first
        state = state_of(trainee, progress, optimizer=optimizer, loading=False, gather_on_first=first)
        with _full_disk_named(partial, all_ranks=True):
            request = planned_save(state, str(partial), dict(METADATA), Handed())
            arguments = list(request.async_fn_args)
            if request.preload_fn is not None:
                arguments[1] = request.preload_fn()  # what to write, taken off the GPU
        files = f"__{dist.get_rank()}_*"
        writer = Writer(request.async_fn, arguments, lambda: sorted(partial.glob(files)))
        self._pending = _Pending(progress["step"], partial, optimizer, request, writer)
        if wait or not self.config.asynchronous:
            self.finish()

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing."""
        return self._pending is not None and self._pending.writer.writing

    def poll(self, writing: bool) -> None:
        """Finishes the checkpoint that is under way, if no rank is still `writing`."""
        if not writing:
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint that is under way, if there is one, and makes it `latest`."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with _full_disk_named(pending.partial, all_ranks=True):
            digests = pending.writer.wait()
            finish_save(pending.request)
        of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, digests)
        known = {name: digest for part in of_ranks for name, digest in part.items()}
        on_first_rank(lambda: self._publish(pending, known))

    def abandon(self) -> None:
        """Ends the writer of a run that fails; what it wrote stays behind as what is none, until the next save."""
        if self._pending is not None:
            self._pending.writer.kill()

    def _place(self, step: int) -> Path:
        return self.out / "checkpoints" / f"step_{step:08d}"

    def _make_room(self, step: int) -> Path:
        final = self._place(step)
        # A name of its own: the writer of a rank that was killed may not have noticed yet.
        partial = final.with_name(f".{final.name}.tmp-{uuid.uuid4().hex[:8]}")
        with _full_disk_named(partial):
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists():
                hide(final)
            for leftover in final.parent.iterdir():
                if TEMPORARY.fullmatch(leftover.name):
                    shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir()
        return partial

    def _publish(self, pending: _Pending, digests: dict[str, str]) -> None:
        partial, final = pending.partial, self._place(pending.step)
        with _full_disk_named(partial):
            save_model_config(self.model, partial)
            if self.tokenizer is not None:
                save_tokenizer(self.tokenizer, partial / "tokenizer")
            facts = {"step": pending.step, "optimizer": pending.optimizer}
            write_manifest(partial, kind="checkpoint", extra=facts, digests=digests)
            fsync_tree(partial)
            partial.rename(final)
            fsync_dir(final.parent)
            _point_to(self.out, final.name)
        _prune(final, self.config.keep)


def _point_to(out: Path, name: str) -> None:
    write_file(out / LATEST, name + "\n")


def _prune(newest: Path, keep: int) -> None:
    """Removes older checkpoints beyond `keep`, and any that claims a later step: a future that was abandoned."""
    complete = complete_checkpoints(newest.parent)
    later = [folder for folder in complete if folder.name > newest.name]
    earlier = [folder for folder in complete if folder.name < newest.name]
    for old in (*later, *earlier[: max(len(earlier) - keep + 1, 0)]):
        shutil.rmtree(hide(old), ignore_errors=True)


@contextlib.contextmanager
def _full_disk_named(folder: Path, *, all_ranks: bool = False) -> Iterator[None]:
    """Turns "no space left", however Megatron wraps it, into one line; what was written of the checkpoint goes.

    With `all_ranks` it is collective: an error of any rank is one of all, and the first rank judges it.
    """
    cause: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        cause = error
    texts = ["".join(traceback.format_exception(cause)) if cause else ""]
    if all_ranks:
        mine, texts = texts[0], [""] * dist.get_world_size()
        dist.all_gather_object(texts, mine)
    texts = [text for text in texts if text]
    if not texts:
        return

    def judge() -> bool:
        # Megatron 0.19 and torch's zip writer keep the reason to themselves: try, before what was written goes.
        full = any(sign in text for sign in SIGNS for text in texts) or not _has_room(folder.parent)
        if full:
            shutil.rmtree(folder, ignore_errors=True)
        return full

    if not (on_first_rank(judge) if all_ranks else judge()):
        reason = texts[0].strip().splitlines()[-1]
        raise RuntimeError(f"{folder.parent}: a checkpoint could not be written: {reason}") from cause
    raise UserError(
        f"{folder.parent}: the disk or a quota is full, a checkpoint could not be saved; the previous one is as it "
        "was; free space and run the same command again"
    ) from cause


def _has_room(folder: Path) -> bool:
    """Whether a little can be written; free bytes would not show a quota."""
    trial = folder / f".trial.tmp-{uuid.uuid4().hex[:8]}"
    try:
        trial.write_bytes(bytes(LITTLE))
        fsync_dir(trial)
    except OSError as error:
        return error.errno not in FULL
    finally:
        trial.unlink(missing_ok=True)
    return True
