#!/usr/bin/env python3
"""Stands in for Slurm's commands, by the name it is called: a queue in the folder $FAKE_SLURM, nothing runs.

`queue` has a line for each job or task, in the fields that `launch/slurm.py` asks for; `calls` the commands. Where the
file `refuse` is, jobs with its text in their line are refused; `say` is printed by sbatch in place of the id, which it
may name as ID; `away` makes squeue and scancel fail; `array` is MaxArraySize, 1001 without.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SLURM"])
QUEUE = FOLDER / "queue"


def said(name: str) -> str:
    path = FOLDER / name
    return path.read_text().strip() if path.exists() else ""


def sbatch(arguments: list[str]) -> str:
    if said("refuse") and said("refuse") in " ".join(arguments):
        sys.exit("sbatch: error: refused")
    count = int(said("count") or 0) + 1
    (FOLDER / "count").write_text(str(count))
    options: dict[str, str] = {}
    while arguments[0].startswith("-"):
        name, _, value = arguments.pop(0).partition("=")
        options[name] = value
    tasks = int(options["--array"].partition("-")[2]) + 1 if "--array" in options else 0
    waits = options.get("--dependency", "").replace(",", "(unfulfilled),")
    with QUEUE.open("a") as queue:
        for job in [f"{count}_{task}" for task in range(tasks)] or [str(count)]:
            facts = [job, "PENDING", options["--job-name"], options["--comment"], waits, options["--output"]]
            queue.write("\x1f".join([*facts, " ".join(arguments)]) + "\x1f\n")
    return (said("say") or "ID").replace("ID", str(count))


def squeue(arguments: list[str]) -> str:
    if said("away"):
        sys.exit(f"slurm_load_jobs error: {said('away')}")
    options = dict(argument.partition("=")[::2] for argument in arguments)
    lines = QUEUE.read_text().splitlines() if QUEUE.exists() else []
    if "--name" not in options:
        return "\n".join(f"{line.split(chr(31))[0]}|{line.split(chr(31))[1]}||1:00|None" for line in lines)
    return "\n".join(line for line in lines if line.split("\x1f")[2] in options["--name"].split(","))


def scancel(arguments: list[str]) -> str:
    if said("away"):
        sys.exit(f"scancel: error: {said('away')}")
    lines = QUEUE.read_text().splitlines() if QUEUE.exists() else []
    left = [s for s in lines if not {s.split("\x1f")[0], s.split("_")[0]} & set(arguments)]
    QUEUE.write_text("".join(f"{line}\n" for line in left))
    return ""


def scontrol(arguments: list[str]) -> str:
    return f"Configuration data as of now\nMaxArraySize            = {said('array') or 1001}\nMaxBatchRequeue = 5"


if __name__ == "__main__":
    command = Path(sys.argv[0]).name
    with (FOLDER / "calls").open("a") as calls:
        calls.write(f"{command} {' '.join(sys.argv[1:])}\n")
    print({"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}[command](sys.argv[1:]))
