"""The work of one tokenising process. Imports neither torch nor Megatron, so that a process starts in a blink."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from btx_nemo.data.sources import SPLITS, Piece, is_validation, read_piece
from btx_nemo.data.tokenizer import Encoder, load_encoder
from btx_nemo.errors import EnvironmentLacks

_BATCH_CHARS = 1 << 18
"""Text handed to the tokenizer at once: its working memory is many times that."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all tasks of one run share."""

    tokenizer: Path
    eod_token: str | None
    append_eod: bool
    text_key: str
    validation_fraction: float
    dtype: str


@dataclass(kw_only=True)
class Encoded:
    """Token ids of one split of one task."""

    ids: np.ndarray
    lengths: list[int]
    num_bytes: int


@dataclass(kw_only=True)
class _Collector:
    """Documents of one split while a task runs."""

    parts: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_bytes: int = 0


def encode_task(task: tuple[Piece, ...], job: Job, encoder: Encoder) -> dict[str, Encoded]:
    """Tokenise the documents of a task, in order. Documents without text are left out."""
    collected = {split: _Collector() for split in SPLITS}
    pending: list[tuple[str, str]] = []
    size = 0
    for piece in task:
        for text in read_piece(piece, job.text_key):
            if not text.strip():
                continue
            split = piece.split or SPLITS[is_validation(text, job.validation_fraction)]
            pending.append((split, text))
            size += len(text)
            if size >= _BATCH_CHARS:
                _flush(pending, collected, job, encoder)
                size = 0
    _flush(pending, collected, job, encoder)
    empty = np.empty(0, dtype=job.dtype)
    return {
        split: Encoded(ids=np.concatenate([empty, *part.parts]), lengths=part.lengths, num_bytes=part.num_bytes)
        for split, part in collected.items()
    }


def _flush(pending: list[tuple[str, str]], collected: dict[str, _Collector], job: Job, encoder: Encoder) -> None:
    for (split, text), ids in zip(pending, encoder.encode([text for _, text in pending]), strict=True):
        if not ids:
            continue
        if job.append_eod and encoder.eod_id is not None:
            ids = [*ids, encoder.eod_id]
        part = collected[split]
        part.parts.append(np.array(ids, dtype=job.dtype))
        part.lengths.append(len(ids))
        part.num_bytes += len(text.encode("utf-8"))
    pending.clear()


_state: dict[str, Any] = {}
"""Per worker process: its job and its tokenizer, loaded once."""


def _start_worker(job: Job) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _state.update(job=job, encoder=load_encoder(job.tokenizer, eod_token=job.eod_token))


def _end_with_parent() -> None:
    """A worker whose parent was killed outright would wait for work for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(task: tuple[Piece, ...]) -> dict[str, Encoded]:
    return encode_task(task, _state["job"], _state["encoder"])


def encode_all(
    tasks: list[tuple[Piece, ...]], job: Job, encoder: Encoder, workers: int
) -> Iterator[dict[str, Encoded]]:
    """Results in the order of the tasks, with at most two tasks per worker in flight."""
    workers = min(workers, len(tasks))
    if workers <= 1:
        yield from (encode_task(task, job, encoder) for task in tasks)
        return
    # spawn: the parent may hold torch's threads, which do not survive a fork
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(job,))
    try:
        yield from _in_order(pool, tasks, 2 * workers)
    except BrokenProcessPool as error:
        raise EnvironmentLacks(
            "prepare-data: a tokenising process ended (out of memory, or started from a script without "
            "`if __name__ == '__main__'`); lower --workers, or use --workers 1"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, tasks: Iterable[tuple[Piece, ...]], window: int
) -> Iterator[dict[str, Encoded]]:
    flying: list[Future[dict[str, Encoded]]] = []
    for task in tasks:
        flying.append(pool.submit(_run_in_worker, task))
        if len(flying) >= window:
            yield flying.pop(0).result()
    for future in flying:
        yield future.result()
