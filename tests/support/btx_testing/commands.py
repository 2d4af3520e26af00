"""`python -m btx_nemo ...` without its start-up time: a process that has torch and Megatron imported forks one child
per command, which then runs the package's `__main__` as a fresh interpreter would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_REPO = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int
    """Exit code; minus the signal's number when one ended it."""
    out: str
    err: str


def ok(ended: Ended) -> Ended:
    """The same, which must have ended well."""
    assert ended.code == 0, ended.err
    return ended


@dataclass(frozen=True)
class Running:
    """A command that runs, leader of a process group of its own."""

    pid: int
    server: CommandServer
    outputs: tuple[Path, Path]

    def kill(self, number: int = signal.SIGKILL, *, group: bool = False) -> None:
        """Sends a signal to the process, or to its whole group."""
        (os.killpg if group else os.kill)(self.pid, number)

    def kill_when(self, condition: Callable[[], bool], number: int = signal.SIGKILL, timeout: float = 120) -> Ended:
        """Sends a signal as soon as the condition holds, and waits for the end."""
        wait_until(condition, timeout)
        self.kill(number)
        return self.wait()

    def wait(self, timeout: float = 120) -> Ended:
        """Waits for the end; kills the group and raises after `timeout` seconds."""
        code = self.server.ask({"wait": self.pid, "timeout": timeout})
        out, err = (path.read_text() for path in self.outputs)
        if code is None:
            raise TimeoutError(f"still running after {timeout} s\n{err}")
        return Ended(code, out, err)


class CommandServer:
    """Starts commands; one per test session."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="btx-commands-")
        self._count = 0
        self._process: subprocess.Popen[str] | None = None

    def start(
        self, *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None, before: str = ""
    ) -> Running:
        """Starts a command. `before` names a function "module:function?argument" that the child calls first."""
        self._count += 1
        out, err = (Path(self._folder.name) / f"{self._count}.{name}" for name in ("out", "err"))
        request = {
            "arguments": [str(a) for a in arguments],
            "env": {**clean_environment(), **(env or {})},
            "cwd": str(cwd or self._folder.name),
            "outputs": [str(out), str(err)],
            "before": before,
        }
        return Running(self.ask(request), self, (out, err))

    def run(self, *arguments: object, timeout: float = 120, **options: object) -> Ended:
        """Runs a command to its end."""
        return self.start(*arguments, **options).wait(timeout)  # type: ignore[arg-type]

    def start_ranks(self, count: int, *arguments: object, before: str = "") -> list[Running]:
        """Starts a command on several ranks of one node, as torchrun would."""
        port = str(free_port())
        common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            self.start(*arguments, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, before=before)
            for r in range(count)
        ]

    def run_ranks(self, count: int, *arguments: object, timeout: float = 120) -> list[Ended]:
        """Runs a command on several ranks to the end of all."""
        return [rank.wait(timeout) for rank in self.start_ranks(count, *arguments)]

    def ask(self, request: dict) -> int:
        """One request to the server."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "btx_testing.commands"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=clean_environment(),
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the server."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=30)
        self._folder.cleanup()


def clean_environment() -> dict[str, str]:
    """This environment without what a launcher or the user's shell may have set for btx-nemo, and with our paths."""
    outer = ("BTX_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "COVERAGE_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    paths = [str(_REPO), str(_REPO / "tests" / "support"), env.get("PYTHONPATH", "")]
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def free_port() -> int:
    """A TCP port that nobody listens on."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(condition: Callable[[], bool], timeout: float = 120) -> None:
    """Returns as soon as the condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.001)


def run_module(
    *arguments: object, launcher: tuple[str, ...] = (), module: str = "btx_nemo", timeout: float = 120
) -> Ended:
    """The command in a fresh interpreter, or through a launcher such as torchrun; slow, and the real thing."""
    command = [sys.executable, *(launcher or ("-m",)), module, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=timeout)
    return Ended(result.returncode, result.stdout, result.stderr)


def torchrun(ranks: int) -> tuple[str, ...]:
    """Launcher arguments for `run_module`."""
    return ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}", "-m")


def _serve() -> None:
    import btx_testing.warm  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        answer = _wait(**request) if "wait" in request else _fork(request)
        print(json.dumps(answer), flush=True)


def _wait(wait: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        pid, status = os.waitpid(wait, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(wait, signal.SIGKILL)
            os.waitpid(wait, 0)
            return None
        time.sleep(0.005)


def _fork(request: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, path in enumerate((os.devnull, *request["outputs"])):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY
        os.dup2(os.open(path, flags, 0o644), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os._exit(_run(request))


def _run(request: dict) -> int:
    import runpy
    import traceback

    sys.argv = ["btx_nemo", *request["arguments"]]
    code: object = 0
    try:
        if request["before"]:
            _call(request["before"])
        runpy.run_module("btx_nemo", run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


def _call(before: str) -> None:
    import importlib

    target, _, argument = before.partition("?")
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(argument)


if __name__ == "__main__":
    _serve()
