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

from btx_nemo.data.chat import ChatEncoder, load_chat_encoder
from btx_nemo.data.sources import SPLITS, Piece, is_validation, read_piece, read_records
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
    chat: bool = False
    """Whether the documents are conversations."""
    chat_template: Path | None = None
    messages_key: str = "messages"


@dataclass(kw_only=True)
class Encoded:
    """Token ids of one split of one task."""

    ids: np.ndarray
    lengths: list[int]
    num_bytes: int
    targets: np.ndarray
    """Of conversations: uint8, 1 where the loss is taken; else empty."""


@dataclass(kw_only=True)
class _Collector:
    """Documents of one split while a task runs."""

    parts: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_bytes: int = 0


def load_encoders(job: Job) -> Encoder | ChatEncoder:
    """What encodes the documents of a job. Raises as `load_encoder` and `load_chat_encoder`."""
    encoder = load_encoder(job.tokenizer, eod_token=job.eod_token)
    if not job.chat:
        return encoder
    return load_chat_encoder(job.tokenizer, encoder, job.chat_template, job.messages_key)


def encode_task(task: tuple[Piece, ...], job: Job, encoder: Encoder | ChatEncoder) -> dict[str, Encoded]:
    """Tokenise the documents of a task, in order. Documents without text are left out."""
    collected = {split: _Collector() for split in SPLITS}
    if isinstance(encoder, ChatEncoder):
        _encode_chats(task, job, encoder, collected)
    else:
        _encode_texts(task, job, encoder, collected)
    empty, none = np.empty(0, dtype=job.dtype), np.empty(0, dtype=np.uint8)
    return {
        split: Encoded(
            ids=np.concatenate([empty, *part.parts]),
            targets=np.concatenate([none, *part.targets]),
            lengths=part.lengths,
            num_bytes=part.num_bytes,
        )
        for split, part in collected.items()
    }


def _encode_chats(task: tuple[Piece, ...], job: Job, encoder: ChatEncoder, collected: dict[str, _Collector]) -> None:
    for piece in task:
        for chat in read_records(piece, encoder.encode):
            part = collected[piece.split or SPLITS[is_validation(chat.text, job.validation_fraction)]]
            part.parts.append(np.array(chat.ids, dtype=job.dtype))
            part.targets.append(chat.targets)
            part.lengths.append(len(chat.ids))
            part.num_bytes += len(chat.text.encode("utf-8"))


def _encode_texts(task: tuple[Piece, ...], job: Job, encoder: Encoder, collected: dict[str, _Collector]) -> None:
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
    _state.update(job=job, encoder=load_encoders(job))


def _end_with_parent() -> None:
    """A worker whose parent was killed outright would wait for work for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(task: tuple[Piece, ...]) -> dict[str, Encoded]:
    return encode_task(task, _state["job"], _state["encoder"])


def encode_all(
    tasks: list[tuple[Piece, ...]], job: Job, encoder: Encoder | ChatEncoder, workers: int
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
