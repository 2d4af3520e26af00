"""What freezing saves: step time, optimizer state, gradients and kept activations against training all weights.

    python scripts/bench_freeze.py [--rounds 7] [--layers 4] [--experts 8] [--seq-length 256] [--micro-batches 2]

One mixture, four times: all weights train; its routers alone; all but the experts; and two-expert style, the first
expert and its router rows frozen. They take turns, a step each on the same batch, in one process on one thread; each
figure is a median of ratios to the full stage of the same round. The last to take its turn is the floor of a stage that
trains its routers: the matrix products that such a step does, by themselves, on operands that lie in the caches.

Bytes are counted, not measured: the optimizer's moments and main weights, Megatron's gradient buffers, and what
autograd keeps for the backward pass. Measured is the last column: the highest resident set of a process of its own,
above that of the interpreter with all that it imports.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class Products(TorchDispatchMode):
    """The matrix products of a step: listens to one, and then does them alone."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.found: list[tuple[Any, list[torch.Tensor]]] = []
        self.operands: dict[tuple[torch.Size, tuple[int, ...]], torch.Tensor] = {}
        with self:
            stage.step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default):
            product = aten.mm.default if args[-1].dim() == 2 else aten.bmm.default
            self.found.append((product, [self._like(tensor) for tensor in args[-2:]]))
        return func(*args, **(kwargs or {}))

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.shape, tensor.stride()
        if key not in self.operands:
            self.operands[key] = torch.empty_strided(*key).normal_()
        return self.operands[key]

    def step(self) -> None:
        """All of them once."""
        for product, operands in self.found:
            product(*operands)


def measure(stages: dict[str, Stage | Products], rounds: int) -> dict[str, dict[str, float]]:
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


def peak(config: TrainConfig) -> int:
    """MB that a process takes above what it took before the model was made: three steps."""
    from btx_nemo.megatron.platform import peak_memory

    before = peak_memory()
    stage = Stage(config)
    for _ in range(3):
        stage.step()
    return (peak_memory() - before) // 2**20


def _peak_elsewhere(name: str) -> int:
    ended = subprocess.run([sys.executable, *sys.argv, "--peak", name], stdout=subprocess.PIPE, check=True)
    return int(ended.stdout)


def main() -> None:
    """Prints the table."""
    from btx_nemo.megatron.parallel import parallel_state

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each stage (default 7)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=2, help="of four sequences, a step (default 2)")
    parser.add_argument("--peak", choices=STAGES, help="nothing but the memory of this stage, in MB")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # what Megatron says of a machine without a GPU
    configs = {name: make_config(options, stage) for name, stage in STAGES.items()}
    with parallel_state(configs["all"].layout, seed=1):
        if options.peak:
            print(peak(configs[options.peak]))
            return
        # Before anything is made here: a process begins with what its parent holds.
        peaks = {name: _peak_elsewhere(name) for name in configs}
        stages = {name: Stage(config) for name, config in configs.items()}
        facts = measure({**stages, "floor": Products(stages["routers"])}, options.rounds)
        held = {name: stage.bytes() for name, stage in stages.items()}
    print("trains             parameters       s   wall    cpu optimizer    grads   kept   peak, MB")
    for name, stage in stages.items():
        optimizer, gradients, kept = (size / whole for size, whole in zip(held[name], held["all"]))
        times = f"{facts[name]['seconds']:>7.3f} {facts[name]['wall']:>6.3f} {facts[name]['cpu']:>6.3f}"
        print(
            f"{name:18} {stage.trained():>10} {times} {optimizer:>9.5f} {gradients:>8.5f} {kept:>6.3f} "
            f"{peaks[name]:>10}",
            flush=True,
        )
    floor = facts["floor"]
    print(f"{'routers, products':29} {floor['seconds']:>7.3f} {floor['wall']:>6.3f} {floor['cpu']:>6.3f}")


if __name__ == "__main__":
    main()
