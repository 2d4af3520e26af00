"""The same graph and the same scripts without Slurm: processes of this machine, each with its log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_json
from btx_nemo.errors import BtxError, EnvironmentLacks, Stopped, UserError
from btx_nemo.launch import state
from btx_nemo.launch.batches import Submission
from btx_nemo.launch.decide import Todo
from btx_nemo.launch.logs import last_words
from btx_nemo.processes import end_with_parent, started

ERRORS: dict[int, type[BtxError]] = {e.exit_code: e for e in (UserError, EnvironmentLacks, Stopped)}
POLL_SECONDS = 0.1


def run_here(todos: Sequence[Todo], submission: Submission, *, limit: int = 1) -> None:
    """Runs what is to run, at most `limit` at the same time, each after those it needs, and waits for the end.

    A script that fails stops those that need it and no other. A TERM or a Ctrl-C makes the running ones save a
    checkpoint, which may take longer than a shell's patience: this waits. Raises the error that belongs to the exit
    status of the first that failed (2, 3, 75; BtxError else), with the reason from its log.
    """
    executor = _Executor(todos, submission, limit)
    with _forwarded(executor), _known(submission.runs):
        executor.go()
    executor.report()


def stop_executor(runs: Path) -> bool:
    """Asks the `submit --local` that is at work in `runs` to stop all that it runs; whether there is one."""
    with contextlib.suppress(UserError, KeyError, ValueError, TypeError, OSError):
        executor = read_json(_executor(runs))
        if executor["started"] and executor["started"] == started(int(executor["pid"])):
            os.kill(int(executor["pid"]), signal.SIGTERM)
            return True
    return False


class _Executor:
    def __init__(self, todos: Sequence[Todo], submission: Submission, limit: int):
        self.submission, self.limit = submission, limit
        self.waiting = {todo.job.name: todo for todo in todos if todo.action == "run"}
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.failed: dict[str, int] = {}
        self.dropped: list[str] = []
        self.stopping = False
        for todo in todos:
            if todo.action == "done":
                print(f"{todo.job.name}: done", flush=True)
            elif todo.action == "join":
                raise UserError(f"{todo.job.name} is {todo.why}; wait for it, or submit without --local")

    def go(self) -> None:
        """Until nothing runs and nothing can be started."""
        while self.waiting or self.running:
            self._start()
            self._collect()
            if self.running:
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Asks the running scripts to save and end, and starts no more."""
        self.stopping = True
        for process, _ in self.running.values():
            process.send_signal(signal.SIGTERM)

    def _start(self) -> None:
        for name, todo in list(self.waiting.items()):
            lost = [one for one in todo.job.after if one in self.failed or one in self.dropped]
            if name == "mix" and self.submission.allow_missing:
                lost = [one for one in lost if not one.startswith("expert-")]
            if self.stopping or lost:
                del self.waiting[name]
                self.dropped.append(name)
            elif len(self.running) < self.limit and not {*todo.job.after} & {*self.waiting, *self.running}:
                del self.waiting[name]
                self._run(todo)

    def _run(self, todo: Todo) -> None:
        job, runs = todo.job, self.submission.runs
        log = _log(runs, job.name)
        command = ["bash", str(self.submission.scripts / job.script), *job.args]
        environment = {**os.environ, **self.submission.environment, "BTX_LOCAL": "1"}
        with log.open("a") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # a Ctrl-C is ours to pass on
                preexec_fn=end_with_parent(),
            )
        self.running[job.name] = process, time.monotonic()
        entry = state.Submitted(
            job="local", line=todo.line, after=[], log=str(log), pid=process.pid, started=started(process.pid)
        )
        state.save_submitted(runs, job.name, entry)
        print(f"{job.name}: started ({todo.why}), log {log}", flush=True)

    def _collect(self) -> None:
        for name, (process, begun) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[name]
            if process.returncode:
                self.failed[name] = process.returncode
                print(f"{name}: {self._said(name)}", flush=True)
            else:
                print(f"{name}: done in {time.monotonic() - begun:.0f} s", flush=True)

    def _said(self, name: str) -> str:
        if self.failed[name] == Stopped.exit_code:
            return "stopped with a checkpoint saved; the same command resumes"
        return f"failed with status {self.failed[name]}: {last_words(_log(self.submission.runs, name))}"

    def report(self) -> None:
        """Raises the error of the first that failed, if any did."""
        if not self.failed:
            if self.stopping:
                raise Stopped("stopped; the same command goes on")
            return
        name, status = next(iter(self.failed.items()))
        others = [*list(self.failed)[1:], *self.dropped]
        rest = f"; not finished either: {', '.join(others)}" if others else ""
        log = _log(self.submission.runs, name)
        raise ERRORS.get(status, BtxError)(f"{name}: {self._said(name)} (log {log}){rest}")


def _executor(runs: Path) -> Path:
    return runs / "state" / "local.json"


@contextlib.contextmanager
def _known(runs: Path) -> Iterator[None]:
    """Others can find this process, in order to stop it."""
    pid = os.getpid()
    write_file(_executor(runs), json.dumps({"pid": pid, "started": started(pid)}) + "\n")
    try:
        yield
    finally:
        _executor(runs).unlink(missing_ok=True)


def _log(runs: Path, name: str) -> Path:
    return runs / "logs" / f"btx-{name}_local.out"


@contextlib.contextmanager
def _forwarded(executor: _Executor) -> Iterator[None]:
    def forward(_number: int, _frame: FrameType | None) -> None:
        executor.stop()

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
