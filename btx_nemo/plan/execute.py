"""Streaming a plan into a sink, in blocks of a few megabytes.

Memory: every worker holds a few blocks, and a few chunks of what is fresh. It does not grow with layers or experts.
Results depend neither on the number of workers nor on their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from math import prod
from typing import Protocol

import torch

from btx_nemo.plan.evaluate import Evaluator, TensorReader, evaluate, torch_dtype
from btx_nemo.plan.expr import ELEMENTWISE, FRESH, Expr, Ties, children, crop, push_down
from btx_nemo.plan.finite import check_result, may_overflow
from btx_nemo.plan.fresh import CHUNK, KEPT_CHUNKS
from btx_nemo.plan.layout import ITEMSIZE, Box
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.workers import default_workers

__all__ = [
    "BLOCK_BYTES",
    "Sink",
    "TensorReader",
    "default_threads",
    "evaluate",
    "execute",
    "peak_memory_bound",
]

BLOCK_BYTES = 2 << 20
"""Target bytes that one worker makes at a time: enough to hide what a block costs beside its bytes (bench_mix.py)."""
MAX_THREADS = 8
"""Threads that are used unless told otherwise, at most: more do not read or write faster."""


class Sink(Protocol):
    """Where a plan's tensors go."""

    def work(self, jobs: tuple[Job, ...]) -> list[list[tuple[Job, Box]]]:
        """Lists of parts to write; one worker runs each list in order. Independent of the number of workers."""

    def offset(self, target: str, box: Box) -> int:
        """The byte of a file where a part begins; memory that agrees with it modulo a page need not be copied."""

    def write(self, target: str, box: Box, tensor: torch.Tensor) -> None:
        """Take one contiguous part; the tensor's memory is used again afterwards."""


def default_threads() -> int:
    """Two threads per CPU, one computing while the other waits for the disk; at most `MAX_THREADS`."""
    return min(2 * default_workers(), MAX_THREADS)


def execute(
    plan: Plan,
    readers: Mapping[str, TensorReader],
    sink: Sink,
    *,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Check the plan, then write every target into `sink`; `progress` is told the bytes of each part written.

    The first error stops all workers and is raised.
    """
    plan.check()
    stop = threading.Event()
    local = threading.local()
    readers, sources = dict(readers), dict(plan.sources)

    def run(parts: list[tuple[Job, Box]]) -> None:
        if not hasattr(local, "evaluator"):
            local.evaluator = Evaluator(readers, sources, seed)
        try:
            _run_parts(parts, local.evaluator, sink, stop, progress)
        except BaseException:
            stop.set()
            raise

    count, inner = workers or default_threads(), torch.get_num_threads()
    try:
        # One thread each inside torch's operations: the workers are the parallelism.
        with ThreadPoolExecutor(count, "btx-mix", torch.set_num_threads, (1,)) as pool:
            futures = [pool.submit(run, parts) for parts in sink.work(plan.jobs)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                for future in futures:
                    if future.done():
                        future.result()
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
    finally:
        torch.set_num_threads(inner)


def _run_parts(
    parts: list[tuple[Job, Box]],
    evaluator: Evaluator,
    sink: Sink,
    stop: threading.Event,
    progress: Callable[[int], None] | None,
) -> None:
    current: Job | None = None
    for job, box in parts:
        if stop.is_set():
            return
        if job is not current:
            current, pushed = job, push_down(job.expr, evaluator.sources, job.info)
            risky = may_overflow(pushed, evaluator.sources, job.info)
        shape = tuple(high - low for low, high in box)
        with evaluator.scratch.tensor(shape, torch_dtype(job.info.dtype), sink.offset(job.target, box)) as out:
            evaluator.into(crop(pushed, box, evaluator.sources, job.info), out, job.info, job.target)
            if risky:
                check_result(out, job.target, tuple(low for low, _ in box))
            sink.write(job.target, box, out)
        if progress is not None:
            progress(prod(shape) * ITEMSIZE[job.info.dtype])


def peak_memory_bound(plan: Plan, workers: int) -> int:
    """Bytes that executing `plan` can hold at once, above the interpreter: the same for every worker.

    A block costs its output and, for each step of its arithmetic, an fp32 sum and one part; the fresh tensors of a
    worker keep a few chunks.
    """
    blocks = max((_blocks(job.expr) for job in plan.jobs), default=0)
    fresh = any(_draws(job.expr) for job in plan.jobs)
    return workers * ((1 + blocks) * 2 * BLOCK_BYTES + fresh * (KEPT_CHUNKS + 2) * CHUNK * 4)


def _blocks(expr: Expr) -> int:
    """Blocks of scratch memory that an expression takes at the same time, at most."""
    within = max(map(_blocks, children(expr)), default=0)
    if isinstance(expr, Ties):
        return len(expr.parts) + 3 + within
    return (3 if isinstance(expr, ELEMENTWISE) else 1) + within


def _draws(expr: Expr) -> bool:
    return isinstance(expr, FRESH) or any(map(_draws, children(expr)))
