"""Gloo ranks that stay up for the whole test session: starting torch and Megatron costs seconds, paid once for all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from btx_nemo.processes import end_with
from btx_testing.commands import clean_environment

MANY_THREADS = 600
"""Workers are replaced beyond: the process groups of a model that trained leave threads behind, about 50 a run."""


class RankFailed(AssertionError):
    """A rank raised; carries its traceback."""


class RankPool:
    """Runs `function(*args)` on ranks 0..n-1 at once, with torch.distributed initialised over gloo."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[tuple[Any, Connection]] = []
        self._stores = tempfile.TemporaryDirectory(prefix="btx-ranks-")

    def run(self, function: Callable[..., Any], *args: Any, ranks: int, timeout: float = 180) -> list[Any]:
        """Results by rank. `function` lives in a module that workers can import (`btx_testing.jobs`)."""
        if any(_threads(process.pid) > MANY_THREADS for process, _ in self._workers):
            self.close()
        self._grow(ranks)
        store = str(Path(self._stores.name) / uuid.uuid4().hex)
        for rank in range(ranks):
            self._workers[rank][1].send((function, args, rank, ranks, store))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < ranks:
            self._receive(ranks, results, failures)
            if failures:  # the others may wait for the failed one for ever: grant them a moment
                deadline = min(deadline, time.monotonic() + 5)
            if time.monotonic() > deadline:
                break
        if len(results) < ranks:
            self.close()
            waiting = [rank for rank in range(ranks) if rank not in results and rank not in failures]
            text = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items()))
            raise RankFailed(f"{text}\nranks without an answer: {waiting}")
        return [results[rank] for rank in range(ranks)]

    def _receive(self, ranks: int, results: dict[int, Any], failures: dict[int, str]) -> None:
        pending = {
            self._workers[rank][1]: rank for rank in range(ranks) if rank not in results and rank not in failures
        }
        for connection in multiprocessing.connection.wait(list(pending), timeout=0.5):
            rank = pending[connection]  # type: ignore[index]
            try:
                ok, value = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                ok, value = False, "the process died"
            (results if ok else failures)[rank] = value

    def _grow(self, ranks: int) -> None:
        self._context.set_forkserver_preload(["btx_testing.warm"])
        with mock.patch.dict(os.environ, clean_environment()):  # for its PYTHONPATH: the server gets no sys.path
            forkserver.ensure_running()
        while len(self._workers) < ranks:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def close(self) -> None:
        """Ends all workers; the next `run` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # not Linux, or gone
        return 0


def _serve(connection: Connection) -> None:
    # A rank that waits for others in a collective never sees the end of the tests; the server it was forked from does.
    end_with(os.getppid(), signal.SIGKILL)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, ranks, store = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, _run(function, args, rank, ranks, store)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _run(function: Callable[..., Any], args: tuple, rank: int, ranks: int, store: str) -> Any:
    import datetime

    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=2),
    )
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    try:
        return function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
