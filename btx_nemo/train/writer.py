"""A process that writes this rank's part of a checkpoint while training goes on, and the checksums of what it wrote.

Megatron plans a save on all ranks, gives a function that writes without any communication, and functions that finish it
on all ranks once that is done everywhere. The writer is a fork: it has the weights as they were when it began, and the
training that goes on in its parent does not change them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.manifest import sha256_of
from btx_nemo.processes import end_with_parent


class Handed:
    """A value that a forked process leaves for its parent, in a file without a name; the parent comes when it ended.

    Megatron's own queue is a pipe, in which a large value blocks until it is read, or a manager process, which outlives
    a killed run and dies of a signal to the whole job.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def put(self, value: Any) -> None:
        """Leaves it."""
        self._file.write(pickle.dumps(value))
        self._file.flush()

    def get_nowait(self) -> Any:
        """Takes it. Raises queue.Empty, as a queue does, where there is none, or a half."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):
            raise queue.Empty from None


class Writer:
    """Writes in the background from its making on."""

    def __init__(self, write: Callable[..., None] | None, arguments: Sequence[Any], files: Callable[[], list[Path]]):
        self._digests = Handed()
        self._process: Any = None
        if write is not None:  # this rank has something to write
            context = multiprocessing.get_context("fork")
            task = (write, arguments, files, self._digests, end_with_parent(signal.SIGKILL))
            self._process = context.Process(target=_write, args=task)
            self._process.start()

    @property
    def writing(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.is_alive()

    def wait(self) -> dict[str, str]:
        """SHA-256 of each file that it wrote, by name, once it has ended; a failure shows when the save is finished."""
        if self._process is None:
            return {}
        self._process.join()
        try:
            return self._digests.get_nowait()
        except queue.Empty:
            return {}

    def kill(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _write(
    write: Callable[..., None],
    arguments: Sequence[Any],
    files: Callable[[], list[Path]],
    digests: Handed,
    end_with_rank: Callable[[], None],
) -> None:
    end_with_rank()
    os.register_at_fork(after_in_child=end_with_parent(signal.SIGKILL))  # Megatron 0.16 forks once more for each file
    try:
        write(*arguments)
        digests.put({path.name: sha256_of(path) for path in files()})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
