"""What `btx-nemo plan` says of a layout's memory beside what the ranks of this machine hold while they train.

    torchrun --nproc-per-node 4 scripts/check_plan.py --tp 2 --ep 2 [--moe] [--precision bf16] [--recompute full]
                                                      [--documents] [--ema] [--offload 0.5] [--save]

Every rank builds a model of 20 to 60 million parameters, takes two steps on random tokens, and reports the peak of its
memory above what it held before: the process's own on a CPU, the allocator's on a GPU. With `--save`, it takes them
before and reports what a checkpoint takes on the host. The first rank prints, for the rank that needs most: planned
MiB, measured MiB, their ratio.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from btx_nemo.config.schema import (
    CheckpointConfig,
    DataConfig,
    EmaConfig,
    LayoutConfig,
    OptimConfig,
    TrainConfig,
)
from btx_nemo.estimate.arguments import AXES
from btx_nemo.estimate.memory import Setup, memory
from btx_nemo.families.config import ModelConfig, MoEConfig


def give_memory_back() -> None:
    """glibc keeps what is freed, and counts it as the process's; let large blocks go back at once."""
    libc = ctypes.CDLL(None)
    for option, value in ((-8, 1), (-3, 1 << 16)):  # M_ARENA_MAX, M_MMAP_THRESHOLD
        libc.mallopt(option, value)


def resident(which: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> None:
    """VmHWM starts again from here."""
    Path("/proc/self/clear_refs").write_text("5")


def make_config(options: argparse.Namespace, ranks: int, hidden_size: int) -> TrainConfig:
    """A run on random tokens; the model's other sizes follow from its hidden size."""
    layout = LayoutConfig(**{name: getattr(options, name) for name in AXES})
    microbatches = 2 * layout.pp
    return TrainConfig(
        stage="mix" if options.moe else "expert",
        out="unused",
        model=ModelConfig(
            num_layers=4,
            hidden_size=hidden_size,
            ffn_hidden_size=hidden_size * 11 // 4,
            num_attention_heads=8,
            num_query_groups=4,
            head_dim=hidden_size // 8,
            vocab_size=16 * hidden_size,
            moe=MoEConfig(num_experts=4, top_k=2) if options.moe else None,
        ),
        data=DataConfig(path="unused", seq_length=hidden_size // 2),
        layout=layout,
        precision=options.precision,
        recompute=options.recompute,
        recompute_modules=options.recompute_modules,
        steps=10,
        micro_batch_size=4,
        global_batch_size=4 * microbatches * layout.dp(ranks),
        optim=OptimConfig(lr=1e-3, warmup_steps=1, offload=options.offload),
        ema=EmaConfig(decay=0.9 if options.ema else 0.0),
    )


def two_steps(config: TrainConfig, documents: bool) -> Any:
    """Builds the model and trains it."""
    from btx_nemo.train.setup import build_trainee
    from btx_nemo.train.source import fresh_source
    from btx_nemo.train.step import train_step

    assert config.model is not None
    length, microbatches = config.data.seq_length, 2 * config.layout.pp
    ids = torch.randint(0, config.model.vocab_size, (4, length + 1))
    positions = torch.arange(length) % (length // 2 if documents else length)
    batch = {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(4, length),
        "position_ids": positions.expand(4, -1).contiguous(),
    }
    trainee = build_trainee(config, fresh_source(config.model), documents=documents)
    for step in range(2):
        train_step(
            trainee,
            iter([batch] * microbatches),
            microbatches=microbatches,
            micro_batch_size=4,
            seq_length=length,
            step=step,
        )
    return trainee


def save(config: TrainConfig, trainee: Any) -> None:
    """A checkpoint, which is removed again. Collective."""
    from btx_nemo.train.checkpoint import on_first_rank
    from btx_nemo.train.saving import Saver

    assert config.model is not None
    folder = Path(on_first_rank(tempfile.mkdtemp))
    saver = Saver(folder, CheckpointConfig(), config.model, tokenizer=None)
    saver.save(trainee, {"step": 2}, last=False, wait=True)
    on_first_rank(lambda: shutil.rmtree(folder))


def measure(config: TrainConfig, ranks: int, *, documents: bool, saves: bool) -> tuple[float, float]:
    """(planned, measured) bytes of the rank that needs most. Collective."""
    from megatron.core import parallel_state as mpu

    from btx_nemo.megatron.platform import device

    on_gpu = device().type == "cuda" and not saves  # what a save takes is the host's
    trainee = two_steps(config, documents) if saves else None
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else resident("VmRSS")
    torch.cuda.reset_peak_memory_stats() if on_gpu else reset_peak()
    save(config, trainee) if saves else two_steps(config, documents)
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM")
    assert config.model is not None
    setup = Setup(
        layout=config.layout,
        ranks=ranks,
        seq_length=config.data.seq_length,
        micro_batch_size=4,
        microbatches=2 * config.layout.pp,
        precision=config.precision,
        recompute=config.recompute,
        recompute_modules=tuple(config.recompute_modules),
        flash=on_gpu,
        documents=documents,
        ema=config.ema.decay > 0,
        offload=config.optim.offload,
    )
    planned = memory(config.model, setup, mpu.get_pipeline_model_parallel_rank())
    wanted = planned.saving if saves else planned.total + (0 if on_gpu else planned.host)
    mine = torch.tensor([wanted, peak - before], dtype=torch.float64, device=device())
    every = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(every, mine)
    first, second = max((pair.tolist() for pair in every), key=lambda pair: pair[1])
    return first, second


def main() -> None:
    """Measures; prints on the first rank."""
    from btx_nemo.megatron.parallel import parallel_state

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in AXES:
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--moe", action="store_true", help="a mixture of 4 experts instead of a dense model")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--recompute-modules", nargs="+", default=["core_attn"])
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--offload", type=float, default=0.0)
    parser.add_argument("--documents", action="store_true", help="two documents a sequence")
    parser.add_argument("--save", action="store_true", help="what a checkpoint takes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    give_memory_back()
    warnings.filterwarnings("ignore")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = make_config(options, ranks, hidden_size=512)
    with parallel_state(config.layout, seed=1):
        small = make_config(options, ranks, hidden_size=32)  # imports, and what is allocated once
        trainee = two_steps(small, options.documents)
        if options.save:
            save(small, trainee)
        planned, measured = measure(config, ranks, documents=options.documents, saves=options.save)
        if torch.distributed.get_rank() == 0:
            print(f"{planned / 2**20:.0f} {measured / 2**20:.0f} {planned / measured:.3f}")


if __name__ == "__main__":
    main()
