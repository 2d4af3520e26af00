"""One training step with some router, on the pool of ranks: everything that has to agree across layouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from btx_nemo.config.schema import LayoutConfig, MoEOverride, OptimConfig, RouterConfig

BETA1 = 0.9


class Settings:
    """The part of TrainConfig that building a trainee reads."""

    def __init__(self, layout: dict[str, int], options: dict[str, Any]):
        self.layout = LayoutConfig(**layout)
        self.router = RouterConfig(**options.get("router", {}))
        self.precision = options.get("precision", "fp32")
        self.recompute = options.get("recompute", "none")
        self.freeze = options.get("freeze", [])
        self.seed, self.steps = 1, 100
        # No clipping: the first moment of AdamW after one step is then the gradient itself, times 1 - beta1.
        self.optim = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=0, beta1=BETA1, clip_grad=0.0)


def source(folder: str, options: dict[str, Any]) -> Any:
    """The model with the router that `options` ask for; what a fresh one starts with at zero has values instead."""
    from btx_nemo.plan.expr import Full, Normal
    from btx_nemo.train.source import open_source

    router = RouterConfig(**options.get("router", {}))
    found = open_source(Path(folder), MoEOverride(**options.get("moe", {})), router)
    expressions = {
        key: (Full(-0.3) if "penalty" in key else Normal(0.1)) if expression == Full(0.0) else expression
        for key, expression in found.expressions.items()
    }
    return dataclasses.replace(found, expressions=expressions)


def steps(folder: str, layout: dict[str, int], batch: dict[str, torch.Tensor], options: dict[str, Any]) -> dict:
    """Loss, gradient norm, this rank's parts of all gradients, and routing of the first step; later losses too.

    options: moe, router, precision, recompute, freeze, micro_batch_size, steps, first (number of the first step).
    """
    from megatron.core import parallel_state as mpu

    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.routing import collect_routing, reset_routing
    from btx_nemo.train.setup import build_trainee
    from btx_nemo.train.step import train_step

    settings = Settings(layout, options)
    model = source(folder, options)
    with parallel_state(settings.layout, seed=1):
        trainee = build_trainee(settings, model)  # type: ignore[arg-type]
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        rows = options.get("micro_batch_size", 1)
        microbatches = batch["tokens"].shape[0] // (rows * size)

        def batches():
            while True:
                for m in range(microbatches):
                    first = (m * size + rank) * rows
                    yield {key: value[first : first + rows] for key, value in batch.items()}

        data, losses, norms, result = batches(), [], [], {}
        for step in range(options.get("first", 0), options.get("first", 0) + options.get("steps", 1)):
            reset_routing(trainee.gpt)
            done = train_step(
                trainee,
                data,
                microbatches=microbatches,
                micro_batch_size=rows,
                seq_length=batch["tokens"].shape[1],
                step=step,
                seed=5,
            )
            losses.append(done.loss)
            norms.append(done.grad_norm)
            if not result:
                routing = collect_routing(trainee.gpt, model.model)
                result = {
                    "routing": dataclasses.asdict(routing) if routing else None,
                    "gradients": gradient_parts(trainee),
                    "dtypes": {
                        name: str(value.dtype)
                        for name, value in trainee.gpt.state_dict().items()
                        if ".router." in name and value is not None
                    },
                }
        return {**result, "losses": losses, "norms": norms}


def gradient_parts(trainee: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """(key, global shape, offset, gradient) of what this rank's optimizer has; after one step without clipping."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from btx_nemo.megatron.load import METADATA
    from btx_nemo.train.optimizer_state import sharded_optimizer_state

    model = trainee.gpt.sharded_state_dict(metadata=dict(METADATA))
    state = {"o": sharded_optimizer_state(trainee.optimizer, model, loading=False, metadata=dict(METADATA))}
    apply_factories(state)
    return [
        (value.key, tuple(value.global_shape), tuple(value.global_offset), value.data.detach().clone() / (1 - BETA1))
        for value in nested_values(state)
        if isinstance(value, ShardedTensor) and "exp_avg." in value.key
    ]


def whole(results: list[dict]) -> dict[str, torch.Tensor]:
    """Gradients by key, put together from all ranks' parts."""
    found: dict[str, torch.Tensor] = {}
    for result in results:
        for key, shape, offset, data in result["gradients"]:
            target = found.setdefault(key, torch.full(shape, float("nan")))
            data = data.reshape((1,) * (len(shape) - data.dim()) + tuple(data.shape))
            target[tuple(slice(o, o + n) for o, n in zip(offset, data.shape))] = data
    return found
