"""Stands in for the ranks of a training under torchrun: gloo, a collective stop, a save that takes its time."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

stops: list[int] = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda n, _: stops.append(n))

keys = {k: v.strip("'") for k, _, v in (a.partition("=") for a in sys.argv[1:])}
out = Path(keys["out"])
out.mkdir(parents=True, exist_ok=True)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
first = int((out / "step").read_text()) if (out / "step").exists() else 0
print(f"rank {rank} of {size} starts at {first}", flush=True)
for step in range(first, int(keys["steps"])):
    stopping = torch.tensor(int(bool(stops)))
    dist.all_reduce(stopping)
    if stopping.item():
        time.sleep(2)
        if rank == 0:
            (out / "step").write_text(str(step))
            print(f"saved by {signal.Signals(stops[0]).name[3:]}", flush=True)
        dist.barrier()
        sys.exit(75)
    time.sleep(0.1)
    if rank == 0:
        (out / "step").write_text(str(step + 1))
dist.barrier()
if rank == 0:
    (out / "DONE").touch()
