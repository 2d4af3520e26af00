#!/usr/bin/env python3
"""Stands in for `btx-nemo` in tests of the job scripts: the same commands and run folders, no torch, 0.05 s a step.

`train` understands `steps=N` and `fail=true`, saves its step on TERM and USR1 and exits 75, and resumes. Every start is
recorded in <out>/starts.jsonl (arguments, first step, time of start and end).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def settings(command: str, arguments: list[str]) -> dict[str, str]:
    """`k=v`: as Hydra reads a quoted value where the command uses Hydra, as it is for `export`."""
    pairs = [a.partition("=") for a in arguments if not a.startswith("-")]
    return {k: v if command == "export" else v.strip("'") for k, _, v in pairs}


def whole_folder(out: Path, content: dict[str, str]) -> None:
    if out.exists():
        sys.exit(f"{out} exists")
    part = out.with_name(f".{out.name}.part")
    part.mkdir(parents=True)
    (part / "config.json").write_text(json.dumps(content))
    part.rename(out)


def train(keys: dict[str, str], argv: list[str]) -> int:
    stop = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: stop.append(n))
    out = Path(keys["out"])
    out.mkdir(parents=True, exist_ok=True)
    main = os.environ.get("SLURM_PROCID", "0") == "0"
    latest = out / "latest"
    first = int(latest.read_text()) if latest.exists() else 0
    started = time.time()
    status = 0
    for step in range(first, int(keys.get("steps", "5"))):
        if stop:
            status = 75
            break
        time.sleep(0.05)
        if main:
            (out / ".latest").write_text(str(step + 1))
            (out / ".latest").rename(latest)
    if keys.get("fail") == "true":
        status = 1
    if not main:
        return status
    with (out / "starts.jsonl").open("a") as file:
        entry = {"argv": argv, "first": first, "stop": stop[:1], "begin": started, "end": time.time()}
        file.write(json.dumps(entry) + "\n")
    if status == 0:
        if keys.get("export") == "true" and not (out / "hf").exists():
            whole_folder(out / "hf", keys)
        (out / "DONE").touch()
    return status


def main() -> int:
    command, argv = sys.argv[1], sys.argv[1:]
    keys = settings(command, sys.argv[2:])
    if command == "train":
        return train(keys, argv)
    whole_folder(Path(keys["out"]), {"argv": " ".join(argv), **keys})
    return 0


if __name__ == "__main__":
    sys.exit(main())
