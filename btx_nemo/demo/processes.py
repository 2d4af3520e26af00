"""Training runs as processes of their own, watched through what they write."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from btx_nemo.errors import BtxError, UserError
from btx_nemo.processes import end_with_parent


@dataclass(frozen=True)
class TrainProcess:
    """One `btx-nemo train` to run."""

    name: str
    config_name: str
    out: Path
    overrides: Sequence[str]
    steps: int
    ranks: int = 1

    def command(self) -> list[str]:
        """Its command line: torchrun for more than one rank."""
        python = [sys.executable, "-m"]
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", "-m"]
        train = ["btx_nemo", "train", "--config-name", self.config_name, f"out={self.out}", f"steps={self.steps}"]
        return [*python, *(launcher if self.ranks > 1 else []), *train, *self.overrides]


def records(out: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics.jsonl."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def run_all(processes: Sequence[TrainProcess], logs: Path, watch: Callable[[Mapping[str, dict]], None]) -> None:
    """Runs all at once; `watch` is given each one's newest record of a training step, twice a second.

    Raises BtxError with the last line of the log when one fails; the others are ended then.
    """
    logs.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    running: dict[str, subprocess.Popen] = {}
    try:
        for process in processes:
            with (logs / f"{process.name}.log").open("w") as log:
                running[process.name] = subprocess.Popen(
                    process.command(),
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=end_with_parent(),
                )
        while True:
            codes = {name: handle.poll() for name, handle in running.items()}
            watch({p.name: _newest_step(p.out) for p in processes})
            for name, code in codes.items():
                if code:
                    kind = UserError if code == UserError.exit_code else BtxError
                    raise kind(f"{name}: training ended with code {code}: {_last_line(logs / f'{name}.log')}")
            if all(code == 0 for code in codes.values()):
                return
            time.sleep(0.5)
    finally:
        for handle in running.values():
            if handle.poll() is None:
                _kill_tree(handle)


def _kill_tree(handle: subprocess.Popen) -> None:
    """Ends a process and all it started: torchrun's ranks have process groups of their own."""
    process = psutil.Process(handle.pid)
    for one in (*process.children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    handle.wait()


def _newest_step(out: Path) -> dict[str, Any]:
    steps = [record for record in records(out) if "loss" in record]
    return steps[-1] if steps else {}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line for line in lines if "btx-nemo" in line]  # torchrun's own report follows it
    return f"{(ours or lines or ['no output'])[-1].strip()} (log: {log})"
