"""What freezing saves: step time, optimizer state, gradients and kept activations against training all weights.

    python scripts/bench_freeze.py [--rounds 7] [--layers 4] [--experts 8] [--seq-length 256] [--micro-batches 2]

One mixture, four times: all weights train; its routers alone; all but the experts; and two-expert style, the first
expert and its router rows frozen. They take turns, a step each on the same batch, in one process on one thread; each
figure is a median of ratios to the full stage of the same round. Bytes are counted, not measured: the optimizer's
moments and main weights, Megatron's gradient buffers, and what autograd keeps for the backward pass.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from btx_nemo.config.schema import DataConfig, OptimConfig, RouterConfig, TrainConfig
from btx_nemo.families.config import ModelConfig, MoEConfig

STAGES: dict[str, dict[str, Any]] = {
    "all": {},
    "routers": {"train": ["*.mlp.router.*"]},
    "all but experts": {"freeze": ["*.mlp.experts.*"]},
    "one expert frozen": {"freeze": ["*.local_experts.0.*"], "router": RouterConfig(frozen_rows=[0])},
}


def make_config(options: argparse.Namespace, stage: dict[str, Any]) -> TrainConfig:
    """A mixture whose expert work dominates, as in a real one."""
    model = ModelConfig(
        num_layers=options.layers,
        hidden_size=256,
        ffn_hidden_size=704,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=64,
        vocab_size=2048,
        max_position_embeddings=options.seq_length,
        moe=MoEConfig(num_experts=options.experts, top_k=2),
    )
    return TrainConfig(
        stage="mix",
        out="unused",
        model=model,
        data=DataConfig(path="unused", seq_length=options.seq_length),
        steps=1000,
        micro_batch_size=4,
        global_batch_size=4 * options.micro_batches,
        optim=OptimConfig(lr=1e-3),
        **stage,
    )


def make_trainee(config: TrainConfig) -> Any:
    """Fresh weights from the seed: the same in every stage."""
    from btx_nemo.train.setup import build_trainee
    from btx_nemo.train.source import fresh_source

    assert config.model is not None
    return build_trainee(config, fresh_source(config.model, config.router))


def batches(config: TrainConfig) -> Iterator[dict[str, torch.Tensor]]:
    """One micro-batch, again and again."""
    assert config.model is not None
    size, length = config.micro_batch_size, config.data.seq_length
    ids = torch.randint(config.model.vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(1))
    batch = {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(size, length),
        "position_ids": torch.arange(length)[None].expand(size, -1).contiguous(),
    }
    while True:
        yield batch


class Stage:
    """One of the four, ready to step."""

    def __init__(self, config: TrainConfig):
        self.config, self.trainee, self.data = config, make_trainee(config), batches(config)

    def step(self) -> None:
        """An optimizer step."""
        from btx_nemo.train.step import train_step

        config = self.config
        train_step(
            self.trainee,
            self.data,
            microbatches=config.global_batch_size // config.micro_batch_size,
            micro_batch_size=config.micro_batch_size,
            seq_length=config.data.seq_length,
        )

    def trained(self) -> int:
        """Parameters that train."""
        return sum(p.numel() for p in self.trainee.gpt.parameters() if p.requires_grad)

    def optimizer_bytes(self) -> int:
        """Moments of AdamW, and main weights where they are others than the model's."""
        tensors = {}
        for part in self.trainee.optimizer.chained_optimizers:
            if part.optimizer is None:
                continue
            for state in part.optimizer.state.values():
                tensors |= {id(v): v for v in state.values() if isinstance(v, torch.Tensor) and v.dim()}
            main = part.shard_fp32_from_float16_groups
            tensors |= {id(v): v for group in main for v in group if v is not None}
        return sum(v.numel() * v.element_size() for v in tensors.values())

    def gradient_bytes(self) -> int:
        """Megatron's gradient buffers."""
        buffers = [b for chunk in self.trainee.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers)

    def kept_bytes(self) -> int:
        """What autograd keeps over a step, each piece of memory once, weights left out."""
        own = {p.untyped_storage().data_ptr() for p in self.trainee.gpt.parameters()}
        kept: list[torch.Tensor] = []  # alive to the end, so that no address is used twice

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.step()
        storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in kept)}
        return sum(size for address, size in storages.items() if address not in own)

    def bytes(self) -> tuple[int, int, int]:
        """Of the optimizer, the gradients, and what autograd keeps."""
        return self.optimizer_bytes(), self.gradient_bytes(), self.kept_bytes()


def measure(stages: dict[str, Stage], rounds: int) -> dict[str, dict[str, float]]:
    """Name -> seconds of a step (median) and its ratio to "all" by wall clock and by processor time."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in stages}
    for number in range(rounds + 1):
        for name, stage in stages.items():
            wall, cpu = time.perf_counter(), time.process_time()
            stage.step()
            if number:  # the first allocates
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    full = times["all"]
    return {
        name: {
            "seconds": statistics.median(wall for wall, _ in found),
            "wall": statistics.median(a[0] / b[0] for a, b in zip(found, full)),
            "cpu": statistics.median(a[1] / b[1] for a, b in zip(found, full)),
        }
        for name, found in times.items()
    }


def main() -> None:
    """Prints the table."""
    from btx_nemo.megatron.parallel import parallel_state

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each stage (default 7)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=2, help="of four sequences, a step (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # what Megatron says of a machine without a GPU
    configs = {name: make_config(options, stage) for name, stage in STAGES.items()}
    with parallel_state(configs["all"].layout, seed=1):
        stages = {name: Stage(config) for name, config in configs.items()}
        facts = measure(stages, options.rounds)
        full = stages["all"].bytes()
        print("trains             parameters       s   wall    cpu optimizer    grads   kept")
        for name, stage in stages.items():
            times = facts[name]
            optimizer, gradients, kept = (size / whole for size, whole in zip(stage.bytes(), full))
            print(
                f"{name:18} {stage.trained():>10} {times['seconds']:>7.3f} {times['wall']:>6.3f} {times['cpu']:>6.3f} "
                f"{optimizer:>9.5f} {gradients:>8.5f} {kept:>6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
