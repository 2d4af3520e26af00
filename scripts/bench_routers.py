"""Forward and backward of each router as a ratio to Megatron's TopKRouter on the same tokens, in one run.

    python scripts/bench_routers.py [--pairs 7] [--tokens 16384] [--hidden 2048] [--experts 8 64] [--dtype fp32]

Both have their balance loss (weight 0.01), ours its statistics as well, as in training. They take turns, so that what
else the machine does falls on both, and without a GPU it is the processor time of this process that counts, on one
thread; the ratio is the median over the pairs. `saved` is the ratio of the bytes that
autograd keeps for the backward pass (on a GPU, of the peak memory). Aims: 1.10 for top_k, divmoe and flexolmo, 1.3 for
the rest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from btx_nemo.config.schema import LayoutConfig, RouterConfig
from btx_nemo.families.config import ModelConfig, MoEConfig

AIMS = {"top_k": 1.1, "divmoe": 1.1, "flexolmo": 1.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "divmoe": {"groups": 4},
    "flexolmo": {"bias": True},
    "nexus": {"embedding_size": 256},
    "expert_choice": {"allow_non_causal": True},
}


def model_with(router: str, top_k: int, experts: int, hidden: int) -> ModelConfig:
    """A model whose only part that is built is a router."""
    moe = MoEConfig(
        num_experts=experts, top_k=top_k, router=router, options=OPTIONS.get(router, {}),
        shared_expert_intermediate_size=hidden if router == "nexus" else None,
    )  # fmt: skip
    return ModelConfig(
        num_layers=2, hidden_size=hidden, ffn_hidden_size=hidden, num_attention_heads=16, num_query_groups=16,
        head_dim=hidden // 16, vocab_size=256, moe=moe,
    )  # fmt: skip


def ours(name: str, experts: int, hidden: int) -> Any:
    """One of our routers."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from btx_nemo.megatron.model import transformer_config
    from btx_nemo.megatron.platform import device
    from btx_nemo.routers import router_class

    kind = router_class(name)
    model = model_with(name, kind.only_top_k or 2, experts, hidden)
    losses = {"z": 0.01} if name == "expert_choice" else {"btx": 0.01}
    config = transformer_config(model, LayoutConfig())
    router = kind(config, get_default_pg_collection(), model=model, options=RouterConfig(losses=losses))
    return _filled(router.to(device()))


def megatrons(experts: int, hidden: int) -> Any:
    """Megatron's own top-2 router with its balance loss, in fp32 as well."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    from btx_nemo.megatron.model import transformer_config
    from btx_nemo.megatron.platform import device

    config = transformer_config(model_with("top_k", 2, experts, hidden), LayoutConfig())
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = "aux_loss", 0.01
    return _filled(TopKRouter(config, get_default_pg_collection()).to(device()))


def _filled(router: Any) -> Any:
    router.set_layer_number(2)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.normal_(0, 0.02)
    return router


def once(router: Any, hidden: torch.Tensor) -> tuple[float, int]:
    """Seconds of a forward and backward pass, and the bytes kept in between (peak memory, on a GPU)."""
    cuda = hidden.is_cuda
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    router.zero_grad()
    hidden.grad = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gates, _ = router(hidden)
    gates.sum().backward()
    if cuda:
        torch.cuda.synchronize()
    seconds = clock() - start
    return seconds, torch.cuda.max_memory_allocated() if cuda else sum(kept.values())


def compare(name: str, experts: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """(time ratio, memory ratio, our milliseconds), medians over the pairs."""
    from btx_nemo.megatron.platform import device

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    hidden = torch.randn(options.tokens // 4, 4, options.hidden, device=device()).to(dtype).requires_grad_()
    pair = (ours(name, experts, options.hidden), megatrons(experts, options.hidden))
    times: list[list[float]] = []
    for _ in range(options.pairs + 2):
        results = [once(router, hidden) for router in pair]
        times.append([seconds for seconds, _ in results])
    ratios = [a / b for a, b in times[2:]]  # the first two warm up
    memory = results[0][1] / results[1][1]
    return statistics.median(ratios), memory, 1000 * statistics.median(a for a, _ in times[2:])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--routers", nargs="+")
    options = parser.parse_args()

    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.routers import router_names

    with parallel_state(LayoutConfig(), seed=1):
        for experts in options.experts:
            print(f"E={experts} T={options.tokens} H={options.hidden} {options.dtype}: time x, saved x, ms, aim")
            for name in options.routers or router_names():
                ratio, memory, milliseconds = compare(name, experts, options)
                print(f"  {name:14}{ratio:6.2f}{memory:8.2f}{milliseconds:9.0f}{AIMS.get(name, 1.3):7.2f}", flush=True)


if __name__ == "__main__":
    main()
