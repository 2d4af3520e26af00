"""One training step with some router, on the pool of ranks: everything that has to agree across layouts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from btx_nemo.config.schema import MoEOverride, OptimConfig, RouterConfig

BETA1 = 0.9


def source(folder: str, options: dict[str, Any]) -> Any:
    """The model with the router that `options` ask for; what a fresh one starts with at zero has values instead."""
    from btx_nemo.plan.expr import Full, Normal
    from btx_nemo.train.source import fresh_source, open_source

    router = RouterConfig(**options.get("router", {}))
    if "fresh" in options:
        return fresh_source(options["fresh"], router)
    found = open_source(Path(folder), MoEOverride(**options.get("moe", {})), router)
    expressions = {
        key: (Full(-0.3) if "penalty" in key else Normal(0.1)) if expression == Full(0.0) else expression
        for key, expression in found.expressions.items()
    }
    return dataclasses.replace(found, expressions=expressions)


def steps(folder: str, layout: dict[str, int], batch: dict[str, torch.Tensor], options: dict[str, Any]) -> dict:
    """Loss, gradient norm, this rank's parts of all gradients, and routing of the first step; later losses too.

    options: fresh (a ModelConfig instead of the folder), moe, router, precision, recompute, freeze, dropout,
    per_token_loss, micro_batch_size, steps, first (number of the first step), documents.
    """
    from btx_nemo.train.routing import collect_routing, reset_routing
    from btx_nemo.train.step import train_step

    with trainee_of(folder, layout, batch, options) as (trainee, model, rest):
        losses, norms, result = [], [], {}
        for step in range(options.get("first", 0), options.get("first", 0) + options.get("steps", 1)):
            reset_routing(trainee.gpt)
            done = train_step(trainee, step=step, seed=5, **rest)
            losses.append(done.loss)
            norms.append(done.grad_norm)
            if not result:
                routing = collect_routing(trainee.gpt, model)
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


@contextlib.contextmanager
def trainee_of(
    folder: str, layout: dict[str, int], batch: dict[str, torch.Tensor], options: dict[str, Any]
) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """(trainee, ModelConfig, keywords of train_step for this global batch, again and again)."""
    from megatron.core import parallel_state as mpu

    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.setup import build_trainee
    from btx_testing.jobs import settings

    # No clipping: the first moment of AdamW after one step is then the gradient itself, times 1 - beta1.
    optim = OptimConfig(
        lr=1e-3, min_lr=1e-4, warmup_steps=0, beta1=BETA1, clip_grad=0.0, weight_decay=0.5, decay_routers=True
    )
    config, model = settings(layout, options, optim), source(folder, options)
    with parallel_state(config.layout, seed=1):
        trainee = build_trainee(config, model, documents=options.get("documents", False))
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        rows = options.get("micro_batch_size", 1)
        microbatches = batch["tokens"].shape[0] // (rows * size)

        def batches() -> Iterator[dict[str, torch.Tensor]]:
            while True:
                for m in range(microbatches):
                    first = (m * size + rank) * rows
                    yield {key: value[first : first + rows] for key, value in batch.items()}

        yield (
            trainee,
            model.model,
            dict(
                batches=batches(),
                microbatches=microbatches,
                micro_batch_size=rows,
                seq_length=batch["tokens"].shape[1],
            ),
        )


def changed_rows(
    folder: str, layout: dict[str, int], batch: dict[str, torch.Tensor], options: dict[str, Any]
) -> dict[str, list[bool]]:
    """Name of a router's parameter -> whether each of its rows has other bits after three steps; this rank's layers."""
    from btx_nemo.train.freeze import global_names
    from btx_nemo.train.step import train_step

    with trainee_of(folder, layout, batch, options) as (trainee, _, rest):
        routers = {key: value for key, value in global_names(trainee.gpt).items() if ".router." in key}
        before = {key: value.detach().clone() for key, value in routers.items()}
        for step in range(3):
            train_step(trainee, step=step, seed=5, **rest)
        return {
            key: [not torch.equal(a, b) for a, b in zip(before[key], value.detach())] for key, value in routers.items()
        }


def dropout(folder: str, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """What enters an expert's down-projection in training and in evaluation, with and without dropout; and losses."""
    from btx_nemo.train.step import mean_validation_loss

    found: dict[str, Any] = {}
    for name, more in (("without", {}), ("with", options)):
        with trainee_of(folder, {}, batch, {**more, "moe": {"router": "soft"}}) as (trainee, _, rest):
            expert = trainee.gpt.decoder.layers[0].mlp.experts.local_experts[1]
            expert.linear_fc2.register_forward_hook(
                lambda module, args, output, key=name: found.__setitem__(key, args[0].detach().clone())
            )
            found[f"valid {name}"] = [mean_validation_loss(trainee, **rest) for _ in range(2)]
            found[f"evaluation {name}"] = found.pop(name)
            trainee.wrapped[0].train()
            torch.manual_seed(3)
            with torch.no_grad():
                trainee.gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return found


def gradient_parts(trainee: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """(key, global shape, offset, gradient) of what this rank's optimizer has; after one step without clipping."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from btx_nemo.megatron.load import METADATA
    from btx_nemo.train.optimizer_state import sharded_optimizer_state

    model = trainee.gpt.sharded_state_dict(metadata=dict(METADATA))
    state = {"o": sharded_optimizer_state(trainee.optimizer, model, (), loading=False, metadata=dict(METADATA))}
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
