"""The numerical check for one GPU, in under eight minutes: what only a GPU can show, as a table and a JSON file.

    python scripts/gpu_check.py [--json gpu_check.json] [--minutes 8] [--cpu-smoke]

- fp8: the loss curve of each FP8 recipe that the preflight lets through, against bf16's on the same data;
- experts: grouped expert layers (Transformer Engine's) against sequential ones, loss and gradient norm of three steps;
- router: forward and backward of our top-k router against Megatron's own;
- speed: tokens/s and model FLOPs utilisation of a training step, dense and mixture.

What is not installed is skipped by name. Exit code 0 when all that ran holds, 1 when something does not, 3 without a
GPU. `--cpu-smoke` goes through the same code on the CPU, at sizes that say nothing: the script's own test.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_routers
import torch
from rich.console import Console
from rich.table import Table

from btx_nemo.config.precision import Fp8Config
from btx_nemo.config.schema import DataConfig, MoEOverride, OptimConfig, TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.megatron.parallel import parallel_state
from btx_nemo.megatron.precision import Device, why_not_grouped
from btx_nemo.megatron.preflight import RECIPES, check_precision

CURVE_BOUND = 0.03
"""Largest relative distance of an FP8 run's smoothed loss from bf16's, after its first tenth."""
PARITY_BOUND = 0.01
"""Largest relative distance of grouped from sequential experts' losses and gradient norms, in bf16."""
ROUTER_BOUND = 1.10
"""Our router's time over Megatron's."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is computed."""

    model: ModelConfig
    seq_length: int
    micro_batch_size: int
    curve_steps: int
    timed_steps: int
    router_tokens: int


def gpu_size() -> Size:
    """About 0.5 billion parameters, 0.2 billion of them active: fits into 24 GB with AdamW."""
    moe = MoEConfig(num_experts=8, top_k=2)
    model = ModelConfig(
        num_layers=8,
        hidden_size=1024,
        ffn_hidden_size=2816,
        num_attention_heads=16,
        num_query_groups=4,
        head_dim=64,
        vocab_size=8192,
        max_position_embeddings=2048,
        moe=moe,
    )
    return Size(model, 2048, 4, curve_steps=100, timed_steps=20, router_tokens=16384)


def cpu_size() -> Size:
    """Just enough to go through."""
    model = dataclasses.replace(
        gpu_size().model,
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=32,
    )
    return Size(model, 32, 2, curve_steps=20, timed_steps=2, router_tokens=64)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    what: str
    value: str
    status: str
    """ok, FAILED, told (not judged) or skipped."""
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For the JSON file."""


def config(size: Size, model: ModelConfig, **changes: Any) -> TrainConfig:
    """A run of this size in bf16."""
    return TrainConfig(
        stage="mix" if model.moe else "expert",
        out="unused",
        model=model,
        data=DataConfig(path="unused", seq_length=size.seq_length),
        **{
            "precision": "bf16",
            "steps": size.curve_steps,
            "micro_batch_size": size.micro_batch_size,
            "global_batch_size": size.micro_batch_size,
            "optim": OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=size.curve_steps // 10),
            **changes,
        },
    )


def batches(size: Size, seed: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences that can be learnt: each token is one of four successors of the one before."""
    vocab, generator = size.model.vocab_size, torch.Generator().manual_seed(seed)
    successors_V4 = torch.randint(vocab, (vocab, 4), generator=generator)
    shape = (size.micro_batch_size, size.seq_length)
    while True:
        tokens = [torch.randint(vocab, shape[:1], generator=generator)]
        choices_BS = torch.randint(4, shape, generator=generator)
        for position in range(size.seq_length):
            tokens.append(successors_V4[tokens[-1], choices_BS[:, position]])
        ids = torch.stack(tokens, dim=1)
        yield {
            "tokens": ids[:, :-1].contiguous(),
            "labels": ids[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(size.seq_length)[None].expand(shape).contiguous(),
        }


def run(size: Size, settings: TrainConfig, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Loss, gradient norm and seconds of each step, from fresh weights that depend on the seed alone."""
    from btx_nemo.train.setup import build_trainee
    from btx_nemo.train.source import fresh_source
    from btx_nemo.train.step import train_step

    assert settings.model is not None
    gc.collect()  # the run before is in cycles of hooks, and holds memory of the device
    source = batches(size)
    data = iter([next(source) for _ in range(steps)])  # made before the clock runs
    trainee = build_trainee(settings, fresh_source(settings.model))
    losses, norms, seconds = [], [], []
    for step in range(steps):
        start = time.perf_counter()
        result = train_step(
            trainee,
            data,
            microbatches=1,
            micro_batch_size=size.micro_batch_size,
            seq_length=size.seq_length,
            step=step,
        )  # reads the loss back, and so waits for the device
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms, seconds


def smoothed(losses: list[float], window: int = 5) -> list[float]:
    """Running means."""
    return [statistics.fmean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


def distance(ours: list[float], theirs: list[float]) -> float:
    """Largest relative distance; infinite where one of them is not finite."""
    if not all(map(math.isfinite, [*ours, *theirs])):
        return math.inf
    return max((abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def judged(check: str, what: str, found: float, bound: float, text: str, **numbers: Any) -> Row:
    """A row that holds or fails."""
    return Row(check, what, text, "ok" if found <= bound else "FAILED", {"found": found, "bound": bound, **numbers})


def check_fp8(size: Size, device: Device) -> Iterator[Row]:
    """Loss curves of the recipes against bf16's."""
    reference: list[float] | None = None
    for recipe in RECIPES:
        settings = config(size, size.model, fp8=Fp8Config(format="hybrid", recipe=recipe))
        try:
            check_precision(settings, size.model, device)
        except UserError as refused:
            yield Row("fp8", recipe, str(refused), "skipped")
            continue
        if reference is None:
            reference = run(size, config(size, size.model), size.curve_steps)[0]
        losses = run(size, settings, size.curve_steps)[0]
        yield compare_curves(recipe, losses, reference)


def compare_curves(recipe: str, losses: list[float], reference: list[float]) -> Row:
    """One recipe's row: after the first tenth, in which both fall steeply."""
    first = len(losses) // 10
    found = distance(smoothed(losses)[first:], smoothed(reference)[first:])
    text = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, bf16 to {reference[-1]:.3f}, apart by {found:.2%} at most"
    return judged("fp8", recipe, found, CURVE_BOUND, text, losses=losses, bf16=reference)


def check_experts(size: Size, device: Device) -> Iterator[Row]:
    """Grouped against sequential expert layers."""
    grouped = config(size, size.model, moe=MoEOverride(experts="grouped"))
    reason = why_not_grouped(grouped, size.model, device)
    if reason is not None:
        yield Row("experts", "grouped", reason, "skipped")
        return
    ours = run(size, grouped, 3)
    theirs = run(size, config(size, size.model, moe=MoEOverride(experts="sequential")), 3)
    for what, a, b in (("loss", ours[0], theirs[0]), ("gradient norm", ours[1], theirs[1])):
        found = distance(a, b)
        yield judged("experts", what, found, PARITY_BOUND, f"apart by {found:.3%} at most", grouped=a, sequential=b)


def check_router(size: Size, device: Device) -> Iterator[Row]:
    """Time of our router over Megatron's."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    options = argparse.Namespace(
        tokens=size.router_tokens, hidden=size.model.hidden_size, dtype="bf16", pairs=2 * size.timed_steps
    )
    assert size.model.moe is not None
    ratio, memory, milliseconds = bench_routers.compare("top_k", size.model.moe.num_experts, options)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # Megatron's, left by a backward pass without its schedule
    numbers = {"memory": memory, "milliseconds": milliseconds}
    text = f"{ratio:.2f} of Megatron's time, {memory:.2f} of its memory"
    if device.capability is None:
        yield Row("router", "top_k", text, "told", {"found": ratio, **numbers})
    else:
        yield judged("router", "top_k", ratio, ROUTER_BOUND, text, **numbers)


def check_speed(size: Size, device: Device) -> Iterator[Row]:
    """Tokens per second and utilisation; told, not judged."""
    from btx_nemo.estimate.suggest import flops
    from btx_nemo.train.throughput import peak_flops

    width = size.model.ffn_hidden_size * 2  # as many weights as a token of the mixture meets
    dense = dataclasses.replace(size.model, moe=None, ffn_hidden_size=width)
    for what, model in (("dense", dense), ("mixture", size.model)):
        settings = config(size, model)
        seconds = run(size, settings, size.timed_steps + 3)[2][3:]  # the first ones allocate and compile
        rate = size.micro_batch_size * size.seq_length / statistics.median(seconds)
        per_second, peak = rate * flops(model, size.seq_length), peak_flops(settings)
        share = f", {per_second / peak:.1%} of the peak" if peak else ", peak unknown"
        text = f"{rate:,.0f} tokens/s, {per_second / 1e12:.2f} TFLOP/s{share}"
        numbers = {"tokens_per_second": rate, "flops_per_second": per_second, "peak": peak}
        yield Row("speed", what, text, "told", numbers)


CHECKS: dict[str, Callable[[Size, Device], Iterator[Row]]] = {
    "experts": check_experts,
    "router": check_router,
    "speed": check_speed,
    "fp8": check_fp8,
}


def rows_in_time(name: str, rows: Iterator[Row], deadline: float) -> Iterator[Row]:
    """A check's rows; those that would begin after the deadline are skipped, and one that fails ends them."""
    while time.monotonic() <= deadline:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the other checks still tell something
            yield Row(name, "stopped", f"{type(error).__name__}: {str(error)[:200]}", "FAILED")
            return
        yield row
    yield Row(name, "the rest", "out of time; give more --minutes", "skipped")


def all_rows(size: Size, device: Device, deadline: float) -> list[Row]:
    """Every check."""
    with parallel_state(config(size, size.model).layout, seed=1):
        return [row for name, check in CHECKS.items() for row in rows_in_time(name, check(size, device), deadline)]


def main() -> int:
    """Prints the table, writes the file; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--cpu-smoke", action="store_true", help="the same code on the CPU, at sizes that say nothing")
    options = parser.parse_args()
    device = Device.here()
    if options.cpu_smoke and device.capability is not None:
        parser.error("--cpu-smoke is for a machine without a GPU")
    if device.capability is None and not options.cpu_smoke:
        print("gpu_check: no GPU here; run it on a machine that has one", file=sys.stderr)
        return 3
    warnings.filterwarnings("ignore")
    size = cpu_size() if options.cpu_smoke else gpu_size()
    started = time.monotonic()
    # A check is not interrupted: the last may run on for as long as one curve takes.
    rows = all_rows(size, device, started + 60 * options.minutes * 0.75)
    title = f"{device.name}, Transformer Engine {device.transformer_engine}"
    table = Table("check", "what", "found", "status", title=title)
    for row in rows:
        table.add_row(row.check, row.what, row.value, row.status)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"took {(time.monotonic() - started) / 60:.1f} minutes")
    facts = {"device": dataclasses.asdict(device), "torch": torch.__version__, "rows": [*map(dataclasses.asdict, rows)]}
    options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if any(row.status == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
