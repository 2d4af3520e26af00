"""The command line of `btx-nemo plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from btx_nemo.config.schema import RECOMPUTE_MODULES

AXES = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "vpp": "virtual stages of a pipeline rank",
    "cp": "context-parallel ranks",
    "ep": "expert-parallel ranks",
    "etp": "ranks that an expert is cut over",
}


def add_plan(command: Callable) -> None:
    """Adds the command."""
    sub = command("plan", run, "Memory and communication of a layout, or the layouts that fit (--memory-gib).")
    sub.add_argument("model", type=Path, help="Hugging Face folder (config.json is enough), checkpoint or run")
    sub.add_argument("--gpus", type=int, help="ranks in all (default: tp x pp x cp x ep x etp)")
    for name, text in AXES.items():
        sub.add_argument(f"--{name}", type=int, help=f"{text} (default 1, or looked for)")
    sub.add_argument("--seq-length", type=int, default=4096, help="tokens a sequence (default 4096)")
    sub.add_argument("--micro-batch-size", type=int, default=1, help="sequences a forward pass (default 1)")
    sub.add_argument("--global-batch-size", type=int, default=1024, help="sequences a step (default 1024)")
    sub.add_argument("--precision", default="bf16", help="fp32, bf16 (default) or fp16")
    sub.add_argument("--recompute", choices=("none", "selective", "full"), help="default none, or looked for")
    sub.add_argument("--recompute-modules", nargs="+", choices=RECOMPUTE_MODULES, default=["core_attn"])
    sub.add_argument("--memory-gib", type=float, help="suggest layouts for --gpus GPUs of this memory")
    sub.add_argument("--ema", action="store_true", help="with an average of the weights (ema.decay)")
    sub.add_argument("--offload", type=float, default=0.0, help="fraction of the optimizer on the host (optim.offload)")
    sub.add_argument("--documents", action="store_true", help="several documents a sequence (SFT, data.document_mask)")
    sub.add_argument("--local", action="store_true", help="Megatron's local layers, which keep attention's matrices")


def run(arguments: argparse.Namespace) -> None:
    """Runs it."""
    from btx_nemo.estimate.command import plan

    plan(
        arguments.model,
        given={name: getattr(arguments, name) for name in AXES if getattr(arguments, name) is not None},
        gpus=arguments.gpus,
        recompute=arguments.recompute,
        memory_gib=arguments.memory_gib,
        step={
            "seq_length": arguments.seq_length,
            "micro_batch_size": arguments.micro_batch_size,
            "global_batch_size": arguments.global_batch_size,
            "precision": arguments.precision,
            "recompute_modules": tuple(arguments.recompute_modules),
            "flash": not arguments.local,
            "documents": arguments.documents,
            "ema": arguments.ema,
            "offload": arguments.offload,
        },
    )
