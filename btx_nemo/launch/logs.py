"""The output of the jobs: where it is, and what it says in the end."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from btx_nemo.errors import UserError
from btx_nemo.launch import state

OURS = re.compile(r"btx-nemo [a-z-]+: |^[a-z_]+\.sh: ")
"""Lines in which a command or a script says why it ends."""
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|[\x00-\x08\x0a-\x1f\x7f-\x9f]")
TAIL_BYTES = 1 << 16


def plain(text: str) -> str:
    """Without control characters and sequences: what jobs write does not steer a terminal. Tabs stay."""
    return CONTROL.sub("", text)


def tail(path: Path, limit: int = TAIL_BYTES) -> list[str]:
    """The last lines of a file, as far as `limit` bytes hold them whole; none where there is no file."""
    if not path.is_file():
        return []
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - limit, 0))
        lines = stream.read().decode("utf-8", "replace").splitlines()
    return lines[1:] if size > limit else lines


def last_words(path: Path) -> str:
    """Why a job ended, by its log: the last line in which a command or a script says so, or else the last line."""
    lines = [line.strip() for line in map(plain, tail(path)) if line.strip()]
    found = [line for line in lines if OURS.search(line)] or [line for line in lines if not line.startswith("[btx]")]
    return (found or lines or ["no output"])[-1]


def show_logs(runs: Path, stage: str | None, *, lines: int, follow: bool) -> None:
    """Prints the end of a stage's log, and goes on with it; without a stage, where the logs are."""
    if stage is None:
        for name in state.stages(runs):
            submitted = state.submitted(runs, name)
            print(f"{name}: {plain(submitted.log) if submitted else 'not submitted'}")
        return
    if stage not in state.stages(runs):
        raise UserError(f"logs: {stage}: no such stage; known: {', '.join(state.stages(runs))}")
    submitted = state.submitted(runs, stage)
    if submitted is None:
        raise UserError(f"logs: {stage}: was not submitted by btx-nemo; its log is where its sbatch put it")
    if not follow and not Path(submitted.log).exists():
        raise UserError(f"{submitted.log}: not there yet; job {submitted.job} has not started (btx-nemo status)")
    command = ["tail", f"--lines={lines}", *(["--follow=name", "--retry"] if follow else []), "--", submitted.log]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:  # a progress bar's \r ends a line, too
                print(plain(line), flush=follow)
        finally:
            process.terminate()
