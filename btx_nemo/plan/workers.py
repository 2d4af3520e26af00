"""How many processes or threads to start where nobody says."""

from __future__ import annotations

import os


def default_workers(most: int | None = None) -> int:
    """The CPUs that this process may use (a Slurm allocation, not the whole node), at most `most`."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, most or cpus)
