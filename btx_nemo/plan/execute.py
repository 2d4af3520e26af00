"""Evaluating expressions and streaming a plan into a sink, in blocks of a few megabytes.

Memory: every worker holds a few blocks, and the whole of a tensor only when it is fresh (a router). It does not grow
with layers or experts. Results depend neither on the number of workers nor on their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from math import prod
from typing import Protocol

import numpy as np
import torch

from btx_nemo.errors import UserError
from btx_nemo.plan.expr import (
    FRESH,
    Concat,
    Expr,
    Full,
    Index,
    Leaf,
    Mean,
    Normal,
    Slice,
    Stack,
    crop,
    generator_for,
    infer,
    leaf,
    push_down,
)
from btx_nemo.plan.layout import ITEMSIZE, Box, Layout, TensorInfo, full_box
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.workers import default_workers

BLOCK_BYTES = 1 << 20
"""Target bytes that one worker makes at a time: with its parts it stays in the CPU's cache (scripts/bench_mix.py)."""
MAX_THREADS = 8
"""Threads that are used unless told otherwise, at most: more do not read or write faster."""


class TensorReader(Protocol):
    """What execution needs of a source."""

    def layout(self) -> Layout:
        """Names, shapes and dtypes, without reading a tensor."""

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read the part `box` of a tensor into `out`, contiguous, of the box's shape and the tensor's dtype."""

    def where(self, name: str) -> str:
        """The file that holds the tensor, for errors."""


class Sink(Protocol):
    """Where a plan's tensors go."""

    def work(self, jobs: tuple[Job, ...]) -> list[list[tuple[Job, Box]]]:
        """Lists of parts to write; one worker runs each list in order. Independent of the number of workers."""

    def write(self, target: str, box: Box, tensor: torch.Tensor) -> None:
        """Take one contiguous part; the tensor's memory is used again afterwards."""


class Scratch:
    """Blocks of memory that a thread uses again and again, one per nesting depth."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._depth = 0

    @contextmanager
    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """An uninitialised tensor, valid inside the context."""
        nbytes = prod(shape) * dtype.itemsize
        if self._depth == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[self._depth].numel() < nbytes:
            self._buffers[self._depth] = torch.empty(nbytes, dtype=torch.uint8)
        buffer = self._buffers[self._depth]
        self._depth += 1
        try:
            yield buffer[:nbytes].view(dtype).view(shape)
        finally:
            self._depth -= 1


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`."""
    return getattr(torch, name)


_INFINITY = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "bfloat16": 0xFF << 7, "float16": 0x1F << 10}
_SIGNED = {8: np.int64, 4: np.int32, 2: np.int16}
_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16}


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a contiguous CPU tensor holds neither NaN nor infinity; exact, two integer maxima and no copy.

    Non-finite values have all exponent bits set, so they are the largest integers of either sign when their bits are
    read as signed (positive ones) and as unsigned (negative ones).
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _INFINITY:
        return not tensor.dtype.is_floating_point or bool(torch.isfinite(tensor.float()).all())
    if tensor.numel() == 0:
        return True
    raw = tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
    flat = raw.numpy().reshape(-1)
    size = tensor.element_size()
    if int(flat.view(_SIGNED[size]).max()) >= _INFINITY[name]:
        return False
    return int(flat.view(_UNSIGNED[size]).max()) < _INFINITY[name] + (1 << (8 * size - 1))


def check_finite(tensor: torch.Tensor, box: Box, name: str, where: str) -> None:
    """Raise UserError naming file, tensor and index when a part of a source tensor is not finite."""
    if all_finite(tensor):
        return
    wide = tensor if tensor.element_size() > 1 else tensor.float()
    at = torch.nonzero(~torch.isfinite(wide))
    local = at[0].tolist()
    index = [low + i for (low, _), i in zip(box, local, strict=True)]
    value = float(tensor[tuple(local)])
    raise UserError(
        f"{where}: tensor {name!r} holds a non-finite value ({value}) at index {index}; train or export it again"
    )


def may_overflow(expr: Expr, sources: Mapping[str, Layout], info: TensorInfo) -> bool:
    """Whether finite sources can give a result that is not: it is fresh or a mean, or a cast narrows its range."""

    def computed(part: Expr) -> bool:
        if isinstance(part, (Slice, Index)):
            return computed(part.of)
        if isinstance(part, (Concat, Stack)):
            return any(map(computed, part.parts))
        return isinstance(part, (Mean, *FRESH))

    return computed(expr) or infer(expr, sources, info).dtype != info.dtype


def check_result(tensor: torch.Tensor, target: str, start: tuple[int, ...]) -> None:
    """Raise UserError naming target and index when a result that begins at index `start` is not finite."""
    if all_finite(tensor):
        return
    local = torch.nonzero(~torch.isfinite(tensor))[0].tolist()
    index = [low + i for low, i in zip(start, local, strict=True)]
    name = str(tensor.dtype).removeprefix("torch.")
    raise UserError(
        f"target tensor {target!r} would hold a value beyond the range of {name} at index {index}; choose another "
        "dtype (dtype=bfloat16 or dtype=float32), or, where sources hold values that large, train them again"
    )


class Evaluator:
    """Evaluates expressions into given memory; one per thread."""

    def __init__(self, readers: Mapping[str, TensorReader], sources: Mapping[str, Layout], seed: int) -> None:
        self.readers = readers
        self.sources = sources
        self.seed = seed
        self.scratch = Scratch()

    def into(self, expr: Expr, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        """Write the value of `expr` (pushed down) into `out`, casting to its dtype. `info` is the whole target's."""
        part = leaf(expr, self.sources)
        if part is not None:
            self._read(part, out)
        elif isinstance(expr, Concat):
            start = 0
            for piece in expr.parts:
                size = infer(piece, self.sources, info).shape[expr.dim]
                self.into(piece, out.narrow(expr.dim, start, size), info, target)
                start += size
        elif isinstance(expr, Stack):
            for i, piece in enumerate(expr.parts):
                self.into(piece, out[i], info, target)
        elif isinstance(expr, Mean):
            self._mean(expr, out, info, target)
        elif isinstance(expr, FRESH):
            self._fresh(expr, out, target)
        elif isinstance(expr, (Slice, Index)):
            inner = infer(expr.of, self.sources, info)
            with self.scratch.tensor(inner.shape, torch_dtype(inner.dtype)) as whole:
                self.into(expr.of, whole, info, target)
                picked = whole[expr.index] if isinstance(expr, Index) else _narrowed(whole, expr)
                out.copy_(picked)

    def _read(self, part: Leaf, out: torch.Tensor) -> None:
        take = part.take
        reader = self.readers[take.source]
        shape = tuple(stop - start for start, stop in part.box)
        dtype = torch_dtype(self.sources[take.source][take.name].dtype)
        if out.dtype == dtype and out.is_contiguous():
            whole = out.view(shape)
            reader.read_into(take.name, part.box, whole)
            check_finite(whole, part.box, take.name, reader.where(take.name))
            return
        with self.scratch.tensor(shape, dtype) as whole:
            reader.read_into(take.name, part.box, whole)
            check_finite(whole, part.box, take.name, reader.where(take.name))
            out.copy_(whole.view(out.shape))

    def _mean(self, expr: Mean, out: torch.Tensor, info: TensorInfo, target: str) -> None:
        inner = infer(expr, self.sources, info)
        dtype = torch_dtype(inner.dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        with self.scratch.tensor(inner.shape, wide) as total, self.scratch.tensor(inner.shape, dtype) as part:
            for i, piece in enumerate(expr.parts):
                self.into(piece, part, info, target)
                total.copy_(part) if i == 0 else total.add_(part)
            # Divide, not multiply by 1/n: the mean of equal values is then that value wherever their sum is exact.
            out.copy_(total.div_(len(expr.parts)))

    def _fresh(self, expr: Normal | Full, out: torch.Tensor, target: str) -> None:
        if isinstance(expr, Full):
            out.fill_(expr.value)
            return
        values = torch.empty(out.shape, dtype=torch.float32)
        generator = generator_for(self.seed, expr.key or target)
        if expr.cut:
            limit = expr.cut * expr.std
            torch.nn.init.trunc_normal_(values, 0.0, expr.std, -limit, limit, generator=generator)
        else:
            values.normal_(0.0, expr.std, generator=generator)
        out.copy_(values)


def _narrowed(tensor: torch.Tensor, expr: Slice) -> torch.Tensor:
    return tensor.narrow(expr.dim, expr.start, expr.stop - expr.start)


def evaluate(
    expr: Expr, readers: Mapping[str, TensorReader], info: TensorInfo, target: str, seed: int, box: Box | None = None
) -> torch.Tensor:
    """The value of an expression as a tensor of dtype `info.dtype`: all of the target, or its part `box`.

    `info` is the whole target's shape and dtype. Reads only the bytes that the part needs.
    """
    sources = {name: reader.layout() for name, reader in readers.items()}
    box = full_box(info.shape) if box is None else box
    part = crop(push_down(expr, sources, info), box, sources, info)
    out = torch.empty([stop - start for start, stop in box], dtype=torch_dtype(info.dtype))
    Evaluator(readers, sources, seed).into(part, out, info, target)
    if may_overflow(expr, sources, info):
        check_result(out, target, tuple(low for low, _ in box))
    return out


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

    with ThreadPoolExecutor(workers or default_workers(MAX_THREADS), thread_name_prefix="btx-mix") as pool:
        futures = [pool.submit(run, parts) for parts in sink.work(plan.jobs)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


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
            whole = (
                evaluate(pushed, evaluator.readers, job.info, job.target, evaluator.seed) if _is_fresh(job) else None
            )
        shape = tuple(high - low for low, high in box)
        with evaluator.scratch.tensor(shape, torch_dtype(job.info.dtype)) as out:
            if whole is not None:  # generated once, then cut: the same numbers whatever the blocks
                out.copy_(whole[tuple(slice(low, high) for low, high in box)])
            else:
                evaluator.into(crop(pushed, box, evaluator.sources, job.info), out, job.info, job.target)
                if risky:
                    check_result(out, job.target, tuple(low for low, _ in box))
            sink.write(job.target, box, out)
        if progress is not None:
            progress(prod(shape) * ITEMSIZE[job.info.dtype])


def _is_fresh(job: Job) -> bool:
    return isinstance(job.expr, FRESH)


def peak_memory_bound(plan: Plan, workers: int) -> int:
    """Bytes that executing `plan` can hold at once, above the interpreter: blocks per worker, or one fresh tensor.

    A block costs its output, an fp32 sum and one source part, whichever is there, in the widest dtype.
    """
    per_worker = 4 * 2 * BLOCK_BYTES
    fresh = max((job.info.numel * 4 + job.info.nbytes for job in plan.jobs if _is_fresh(job)), default=0)
    return workers * (per_worker + fresh)
