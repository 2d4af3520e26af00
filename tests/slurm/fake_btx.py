#!/usr/bin/env python3
"""Stands in for `btx-nemo` in tests of the job scripts: the same commands and run folders, no torch, 0.05 s a step.

`train` understands `steps=N`, `fail=true`, `fill=true` (its disk is full) and `meet=N` (it goes on once N experts have
begun), saves its step on TERM and USR1 and exits 75, and resumes. Its weights are a hash over all steps and what it
started from: one that is lost, done twice or done from elsewhere changes them. Every start is recorded in
<out>/starts.jsonl (arguments, first step, start and end).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def settings(command: str, arguments: list[str]) -> dict[str, str]:
    """`k=v`: as Hydra reads a quoted value where the command uses Hydra, as it is for `export`."""
    pairs = [a.partition("=") for a in arguments if not a.startswith("-")]
    return {k: v if command == "export" else v.strip("'") for k, _, v in pairs}


def weights_of(folder: str) -> str:
    """The weights of a run or of a model folder."""
    path = Path(folder)
    for file in (path / "hf" / "weights", path / "weights"):
        if file.exists():
            return file.read_text()
    latest = path / "latest"
    return weights_of(str(path / "checkpoints" / latest.read_text())) if latest.exists() else "none"


def advance(weights: str, what: object) -> str:
    return hashlib.sha256(f"{weights} {what}".encode()).hexdigest()


def whole_folder(out: Path, content: dict[str, str], weights: str) -> None:
    if out.exists():
        sys.exit(f"{out} exists")
    part = out.with_name(f".{out.name}.part")
    part.mkdir(parents=True)
    (part / "config.json").write_text("{}")
    (part / "manifest.json").write_text(json.dumps(content))
    (part / "weights").write_text(weights)
    part.rename(out)


def save(out: Path, step: int, weights: str) -> None:
    folder = out / "checkpoints" / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".weights").write_text(weights)
    (folder / ".weights").rename(folder / "weights")
    (out / ".latest").write_text(str(step))
    (out / ".latest").rename(out / "latest")
    shutil.rmtree(out / "checkpoints" / str(step - 1), ignore_errors=True)


def train(keys: dict[str, str], argv: list[str]) -> int:
    stop = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: stop.append(n))
    out = Path(keys["out"])
    out.mkdir(parents=True, exist_ok=True)
    main = os.environ.get("SLURM_PROCID", "0") == "0"
    latest = out / "latest"
    first, weights = 0, advance(weights_of(keys.get("init_from") or os.environ["BTX_SEED"]), keys.get("domain", ""))
    if latest.exists():
        first, weights = int(latest.read_text()), weights_of(str(out / "checkpoints" / latest.read_text()))
    steps = int(keys.get("steps", "5"))
    started = time.time()
    (out / "resolved.yaml").write_text(f"{{steps: {steps}, global_batch_size: 4, data: {{seq_length: 25}}}}")
    while len(list(out.parent.glob("expert-*/resolved.yaml"))) < int(keys.get("meet", "0")):
        time.sleep(0.05)
        if time.time() > started + 120:
            sys.exit("the others have not begun")
    status = 0
    for step in range(first, steps):
        if stop:
            status = 75
            break
        time.sleep(0.05)
        weights = advance(weights, step)
        if keys.get("fill") == "true" and not (out.parent / "room").exists():
            sys.exit(f"btx-nemo train: {out}/checkpoints: the disk or a quota is full")
        if main:
            save(out, step + 1, weights)
            record = {"step": step + 1, "loss": 1 / (step + 1), "tokens_per_second": 2000.0}
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
    if keys.get("fail") == "true":
        status = 1
    if not main:
        return status
    with (out / "starts.jsonl").open("a") as file:
        entry = {"argv": argv, "first": first, "stop": stop[:1], "begin": started, "end": time.time()}
        file.write(json.dumps(entry) + "\n")
    if status == 0:
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": steps, "valid": {"math": 0.5}}) + "\n")
        if keys.get("export") == "true" and not (out / "hf").exists():
            whole_folder(out / "hf", keys, weights)
        (out / "DONE").touch()
    return status


def main() -> int:
    command, argv = sys.argv[1], sys.argv[1:]
    if command == "verify":
        return 0 if weights_of(sys.argv[2]) == weights_of(sys.argv[3]) else 1
    keys = settings(command, sys.argv[2:])
    if command == "train":
        return train(keys, argv)
    if command == "prepare-data":
        Path(argv[argv.index("--out") + 1]).mkdir(parents=True)
        return 0
    sources = (
        [keys["in"]]
        if command == "export"
        else [v for k, v in keys.items() if k.partition(".")[0] in ("seed", "experts")]
    )
    weights = weights_of(keys["in"]) if command == "export" else advance("", [*map(weights_of, sources)])
    whole_folder(Path(keys["out"]), {"argv": " ".join(argv), **keys}, weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
