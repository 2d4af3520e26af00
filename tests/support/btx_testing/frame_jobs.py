"""Single routers on the pool of ranks, without a model around them."""

from __future__ import annotations

from typing import Any

import torch

from btx_nemo.config.schema import LayoutConfig, RouterConfig
from btx_nemo.families.config import ModelConfig, MoEConfig

OPTIONS: dict[str, dict[str, Any]] = {
    "divmoe": {"groups": 2},
    "flexolmo": {"bias": True},
    "switch": {"capacity_factor": 1.0},
    "expert_choice": {"allow_non_causal": True},
    "nexus": {"embedding_size": 4},
}
LOSSES = ("btx", "switch", "hf", "switch_seq", "importance", "z")
HIDDEN, EXPERTS, LENGTH, ROWS = 8, 4, 8, 3


def make(
    name: str,
    losses: tuple[str, ...] = LOSSES,
    layer: int = 2,
    experts: int = EXPERTS,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A router with random weights, the same on all ranks; its micro-batches are [LENGTH, ROWS, HIDDEN]."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from btx_nemo.megatron.model import transformer_config
    from btx_nemo.routers import router_class

    kind = router_class(name)
    top_k = kind.only_top_k or 2
    moe = MoEConfig(
        num_experts=experts, top_k=top_k, router=name, options=OPTIONS.get(name, {}) if settings is None else settings,
        shared_expert_intermediate_size=8 if name == "nexus" else None,
    )  # fmt: skip
    model = ModelConfig(
        num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=8, num_attention_heads=2, num_query_groups=2, head_dim=4,
        vocab_size=16, moe=moe,
    )  # fmt: skip
    config = transformer_config(model, LayoutConfig())
    for key, value in changes.items():
        setattr(config, key, value)
    options = RouterConfig(losses=dict.fromkeys(losses, 1.0))
    router = kind(config, get_default_pg_collection(), model=model, options=options)
    router.set_layer_number(layer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return router


def _outcome(router: Any, hidden: torch.Tensor, mask: torch.Tensor | None, ranks: int, rank: int) -> dict:
    """Losses, gradients (summed over ranks as Megatron does) and statistics of one micro-batch."""
    import torch.distributed as dist
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    own = router.places.here(hidden.shape[0] // ranks)
    router.zero_grad()
    router.statistics.reset()
    torch.manual_seed(11)
    # A schedule leaves its scale, which may differ from rank to rank: none here, and put it back for 0.19's schedules.
    scale, MoEAuxLossAutoScaler.main_loss_backward_scale = MoEAuxLossAutoScaler.main_loss_backward_scale, None
    gates, kept = router(hidden[own], None if mask is None else mask[own])
    valid = torch.ones_like(gates[:, 0], dtype=torch.bool) if mask is None else ~mask[own].flatten()
    (gates * kept * torch.arange(1.0, EXPERTS + 1))[valid].sum().backward()
    MoEAuxLossAutoScaler.main_loss_backward_scale = scale
    result = {}
    for key, parameter in router.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(grad)
        result[f"grad {key}"] = grad
    sums = router.statistics.collect()
    for key, value in vars(sums).items():
        value = value.clone()
        dist.all_reduce(value)
        result[key] = value
    return result


def padding(name: str, layout: dict[str, int]) -> tuple[dict, dict]:
    """One sequence entirely padding with garbage in it, against the batch without it."""
    from megatron.core import parallel_state as mpu

    from btx_nemo.megatron.parallel import parallel_state

    with parallel_state(LayoutConfig(**layout), seed=1):
        ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        losses = tuple(x for x in LOSSES if x == "z") if name == "expert_choice" else LOSSES
        router = make(name, losses)
        if name == "noisy_top_k":  # the noise's shape is the batch's, with or without padding
            router.eval().requires_grad_(True)
        hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
        if name == "expert_choice":
            router.settings = type(router.settings)(allow_non_causal=True, capacity_factor=2.0)
        mask = torch.zeros(LENGTH, ROWS, dtype=torch.bool)
        mask[:, 1] = True
        garbage = hidden.clone()
        garbage[:, 1] = 50.0
        clean = _outcome(router, hidden[:, [0, 2]], None, ranks, rank)
        padded = _outcome(router, garbage, mask, ranks, rank)
        return padded, clean


def global_counts() -> tuple[list[float], list[float]]:
    """Our switch_global, and Megatron's formula on the same selections."""
    import torch.distributed as dist
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    from btx_nemo.megatron.parallel import parallel_state

    with parallel_state(LayoutConfig(), seed=1):
        router = make("top_k", ("switch_global",))
        generator = torch.Generator().manual_seed(5 + dist.get_rank())
        ours, theirs = [], []
        for step in range(2):
            router.begin_step(step)
            total, count = torch.zeros(EXPERTS), 0
            for _ in range(3):
                hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=generator)
                router.statistics.reset()
                _, kept = router(hidden)
                ours.append(router.statistics.collect().losses.sum().item())
                counts = kept.sum(0).float()
                dist.all_reduce(counts)
                total, count = total + counts, count + 1
                probs = (hidden.flatten(0, 1) @ router.weight.T).softmax(-1)
                tokens = LENGTH * ROWS
                # Megatron divides by the global tokens twice; its sum over ranks is the mean of what each rank has.
                value = switch_load_balancing_loss_func(probs, total / count / 2, tokens, 2, EXPERTS, 1.0)
                theirs.append(value.item())
        return ours, theirs


def casts() -> dict[str, Any]:
    """bfloat16() and half() on a router."""
    from btx_nemo.megatron.parallel import parallel_state

    with parallel_state(LayoutConfig(), seed=1):
        router = make("top_k")
        before = router.weight.detach().clone()
        router.bfloat16()
        router.half()
        return {"weight": str(router.weight.dtype), "exact": torch.equal(router.weight, before)}


FOREIGN = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "moe_input_jitter_eps": 0.01,
    "moe_router_dtype": "fp64",
    "moe_router_fusion": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.0,
    "moe_router_topk_limited_devices": 2,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_enable_expert_bias": True,
    "moe_router_force_load_balancing": True,
    "moe_token_dropping": True,
    "moe_pad_expert_input_to_capacity": True,
    "moe_expert_capacity_factor": 1.25,
    "moe_router_topk": 3,
    "num_moe_experts": 8,
}
"""Settings of Megatron's router that ask for what ours does not do."""


def refusals() -> dict[str, list[str]]:
    """Setting -> what each router says to it, in one line."""
    from btx_nemo.errors import UserError
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.routers import router_names

    messages: dict[str, list[str]] = {key: [] for key in FOREIGN}
    with parallel_state(LayoutConfig(), seed=1):
        for name in router_names():
            for key, value in FOREIGN.items():
                try:
                    make(name, **{key: value})
                    messages[key].append(f"{name}: accepted")
                except UserError as error:
                    messages[key].append(str(error))
    return messages


def context_parallel(name: str) -> tuple[dict, dict]:
    """The outcome of a router on two context-parallel ranks, with padding, and on one."""
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    from btx_nemo.megatron.platform import cpu_platform

    hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    mask = torch.rand(LENGTH, ROWS, generator=torch.Generator().manual_seed(2)) < 0.3
    outcomes = []
    with cpu_platform():
        for size in (2, 1):
            mpu.initialize_model_parallel(context_parallel_size=size)
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            router = make(name, context_parallel_size=size)
            outcomes.append(_outcome(router, hidden, mask, size, mpu.get_context_parallel_rank()))
            mpu.destroy_model_parallel()
    both, one = outcomes
    # On one context-parallel rank the two processes are data parallel and did the same: their sum is twice as much.
    return both, {key: value / 2 for key, value in one.items()}


def noise() -> dict[str, bool]:
    """Gates of noisy_top_k under one seed and others."""
    from btx_nemo.megatron.parallel import parallel_state

    with parallel_state(LayoutConfig(), seed=1):
        first, other = make("noisy_top_k"), make("noisy_top_k", layer=3)
        hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))

        def gates(router: Any, seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            torch.rand(7)  # the state does not matter
            return router(hidden)[0]

        base = gates(first, 1)
        return {
            "again": torch.equal(base, gates(first, 1)),
            "other seed": torch.equal(base, gates(first, 2)),
            "other layer": torch.equal(base, gates(other, 1)),
        }


def nexus_cache() -> dict[str, bool]:
    """Whether expert embeddings are kept in evaluation and made anew after training."""
    from btx_nemo.megatron.parallel import parallel_state

    with parallel_state(LayoutConfig(), seed=1), torch.no_grad():
        router = make("nexus").eval()
        first = router.expert_embeddings()
        cached = router.expert_embeddings() is first
        router.train()
        router.w2.mul_(2)
        router.eval()
        return {"cached": cached, "after training": torch.equal(router.expert_embeddings(), 2 * first)}


def own_router(name: str) -> list[float]:
    """The load of a router that a test registers; each rank registers it for itself."""
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.routers import register_router

    register_router(name, "btx_testing.own_router:FirstExperts")
    with parallel_state(LayoutConfig(), seed=1):
        router = make(name)
        router(torch.randn(LENGTH, ROWS, HIDDEN))
        sums = router.statistics.collect()
        return (sums.selected / sums.selected.sum()).tolist()


def per_token(loss: str, layout: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The gradient of a loss on the router's weight, without and with a loss per token, and the valid tokens."""
    import torch.distributed as dist
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from btx_nemo.megatron.parallel import parallel_state

    with parallel_state(LayoutConfig(**layout), seed=1):
        size, rank = dist.get_world_size(), dist.get_rank()
        hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
        mask = torch.rand(LENGTH, ROWS, generator=torch.Generator().manual_seed(2)) < 0.3
        own = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
        scale, MoEAuxLossAutoScaler.main_loss_backward_scale = MoEAuxLossAutoScaler.main_loss_backward_scale, None
        grads = []
        for on in (False, True):
            router = make("top_k", (loss,), calculate_per_token_loss=on)
            gates, _ = router(hidden[own], mask[own])
            (gates * 0).sum().backward()
            dist.all_reduce(router.weight.grad)
            grads.append(router.weight.grad)
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale
        return grads[0], grads[1], int((~mask).sum())


def opted_out(name: str, experts: int, gone: list[int], settings: tuple[dict, dict]) -> dict[str, torch.Tensor]:
    """A router whose experts `gone` have a logit of minus infinity, and one that was never given them; both gates."""
    from btx_nemo.megatron.parallel import parallel_state

    left = [expert for expert in range(experts) if expert not in gone]
    hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    with parallel_state(LayoutConfig(), seed=1), torch.no_grad():
        whole = make(name, experts=experts, settings=settings[0]).eval()
        never = make(name, experts=len(left), settings=settings[1]).eval()
        for key, value in {**dict(whole.named_parameters()), **dict(whole.named_buffers())}.items():
            target = never.get_parameter(key) if key in dict(never.named_parameters()) else never.get_buffer(key)
            if key == "penalty":  # which expert 0 lacks
                value = value[[expert - 1 for expert in left if expert]]
            elif value.shape[0] == experts:
                value = value[left]
            target.copy_(value)
        logits = whole.logits

        def closed(hidden_TH: torch.Tensor) -> torch.Tensor:
            values = logits(hidden_TH)
            values[:, gone] = float("-inf")
            return values

        whole.logits = closed
        gates, kept = whole(hidden)
        gates_never, kept_never = never(hidden)
        return {
            "out": gates[:, left],
            "never": gates_never,
            "gone": gates[:, gone],
            "kept": kept[:, left],
            "kept never": kept_never,
        }
