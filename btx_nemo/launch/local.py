"""Running a job script on this machine, in the foreground, with its signals passed on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

from btx_nemo.errors import BtxError, EnvironmentLacks, Stopped, UserError

ERRORS: dict[int, type[BtxError]] = {e.exit_code: e for e in (UserError, EnvironmentLacks, Stopped)}


def run_here(name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs `bash command...` with `environment` added and waits for its end.

    A TERM or a Ctrl-C makes the script save a checkpoint, which may take longer than a shell's patience: this waits.
    Raises the error that belongs to a nonzero exit status (2, 3, 75; BtxError else), with `name` and the script.
    """
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        # A terminal sends its Ctrl-C to the script as well.
        if process is not None and number == signal.SIGTERM:
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        process = subprocess.Popen(["bash", *command], env={**os.environ, **environment, "BTX_LOCAL": "1"})
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if status == 0:
        return
    said = f"ended with status {status}"
    if status == Stopped.exit_code:
        said = "stopped with a checkpoint saved; the same command resumes"
    raise ERRORS.get(status, BtxError)(f"submit: {name}: {command[0]} {said}")
