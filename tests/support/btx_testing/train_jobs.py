"""Parts of a training run, for the pool of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from btx_nemo.config.schema import (
    DataConfig,
    EmaConfig,
    LayoutConfig,
    LossScaleConfig,
    MoEOverride,
    OptimConfig,
    RouterConfig,
    TrainConfig,
)

OWN = ("freeze", "train", "precision", "steps", "recompute", "recompute_modules")
SECTIONS = {"ema": EmaConfig, "router": RouterConfig, "moe": MoEOverride, "loss_scale": LossScaleConfig}


def config(model: str, layout: dict[str, int], options: dict[str, Any]) -> TrainConfig:
    """A run's configuration; `options` may hold keys of it (OWN and SECTIONS) and OptimConfig's."""
    rest = dict(options)
    own = {key: rest.pop(key) for key in OWN if key in rest}
    own |= {key: kind(**rest.pop(key)) for key, kind in SECTIONS.items() if key in rest}
    return TrainConfig(
        stage="expert",
        out="unused",
        init_from=model,
        data=DataConfig(path="unused", seq_length=16),
        layout=LayoutConfig(**layout),
        micro_batch_size=1,
        global_batch_size=2,
        optim=OptimConfig(**{"lr": 1e-3, **rest}),
        **{"steps": 10, **own},
    )


@contextlib.contextmanager
def trainee(model: str, layout: dict[str, int], options: dict[str, Any]) -> Iterator[Any]:
    """The model that trains, on this rank."""
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.setup import build_trainee
    from btx_nemo.train.source import open_source

    settings = config(model, layout, options)
    with parallel_state(settings.layout, seed=1):
        yield build_trainee(settings, open_source(Path(model)))


def steps(subject: Any, count: int, vocab_size: int = 288, mask: float = 1.0) -> Iterator[Any]:
    """Results of `count` steps of two micro-batches of one sequence of 16 tokens, the same on all ranks."""
    from btx_nemo.train.step import train_step
    from btx_testing.jobs import random_batch

    batch = random_batch(vocab_size, total=1, length=16)
    batch["loss_mask"] *= mask

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield batch

    data = batches()
    for _ in range(count):
        yield train_step(subject, data, microbatches=2, micro_batch_size=1, seq_length=16)


def rates(model: str, options: dict[str, Any], count: int) -> list[float]:
    """Learning rate of each step."""
    with trainee(model, {}, options) as subject:
        return [result.lr for result in steps(subject, count)]


def losses(model: str, layout: dict[str, int], options: dict[str, Any], count: int) -> list[float]:
    """Loss of each step."""
    with trainee(model, layout, options) as subject:
        return [result.loss for result in steps(subject, count)]


def loss_scales(
    model: str, layout: dict[str, int], options: dict[str, Any], count: int, bombs: list[int]
) -> list[dict[str, Any]]:
    """Of each step in fp16: whether it was taken, the rate it had, each part's scale after it, and whether the weights
    moved. In the steps that `bombs` number only the experts' gradients overflow.
    """
    from btx_nemo.train.optimizer_state import _scalers

    with trainee(model, layout, {"precision": "fp16", **options}) as subject:
        for parameter in subject.gpt.parameters():
            if not getattr(parameter, "allreduce", True):
                parameter.register_hook(lambda gradient: gradient + bomb[0])
        bomb, found = [0.0], []
        for number in range(count):
            bomb[0] = float("inf") if number in bombs else 0.0
            before = [p.detach().clone() for p in subject.gpt.parameters()]
            (result,) = steps(subject, 1)
            moved = any(not torch.equal(a, b) for a, b in zip(before, subject.gpt.parameters()))
            scales = [scaler.scale.item() for scaler in _scalers(subject.optimizer)]
            found.append({"ok": result.ok, "lr": result.lr, "scales": scales, "moved": moved, "finite": result.finite})
        return found


def parameter_groups(model: str, layout: dict[str, int], options: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Global name -> (learning rate, weight decay) in the optimizer after two steps."""
    from btx_nemo.train.freeze import global_names

    with trainee(model, layout, options) as subject:
        list(steps(subject, 2))
        names = {parameter: name for name, parameter in global_names(subject.gpt).items()}
        found = {}
        for part in subject.optimizer.chained_optimizers:
            for parameter, (group, _) in part.model_param_group_index_map.items():
                settings = part.optimizer.param_groups[group]
                found[names[parameter]] = (settings["lr"], settings["weight_decay"])
        return found


def changed_parameters(model: str, layout: dict[str, int], options: dict[str, Any]) -> dict[str, bool]:
    """Global name -> whether this rank's part has other bits after three steps."""
    from btx_nemo.train.freeze import global_names

    with trainee(model, layout, options) as subject:
        before = {name: value.detach().clone() for name, value in global_names(subject.gpt).items()}
        list(steps(subject, 3))
        after = global_names(subject.gpt)
        return {name: not torch.equal(before[name], after[name].detach()) for name in before}


def cost(model: str, layout: dict[str, int], options: dict[str, Any]) -> dict[str, int]:
    """Of a step of 32 tokens: multiply-adds in matrix products, numbers with a gradient buffer, moments of AdamW."""
    from torch.utils.flop_counter import FlopCounterMode

    with trainee(model, layout, options) as subject:
        list(steps(subject, 1))
        with FlopCounterMode(display=False) as counter:
            list(steps(subject, 1))
        buffers = [b for chunk in subject.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        states = [
            state
            for part in subject.optimizer.chained_optimizers
            if part.optimizer is not None
            for state in part.optimizer.state.values()
        ]
        return {
            "products": counter.get_total_flops() // 2,
            "gradients": sum(p.numel() for buffer in buffers for p in buffer.param_index_map),
            "moments": sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in states),
        }


def learning_rates(options: dict[str, Any], count: int) -> tuple[list[float], list[float]]:
    """Rates of a weight and of a router before each of the first `count` steps, and after the last.

    By Megatron's scheduler as a run builds it; of the model there is nothing but these two parameters.
    """
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.optimizer import build_optimizer

    settings = config("unused", {}, options)
    with parallel_state(settings.layout, seed=1):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.transformer_config import TransformerConfig

        model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": torch.nn.Linear(4, 4, bias=False)})})
        model["proj"] = torch.nn.Linear(4, 4, bias=False)
        wrapped = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            torch.nn.ModuleDict({"layer": model}),
        )
        optimizer, scheduler = build_optimizer(settings, [wrapped])
        rates: tuple[list[float], list[float]] = [], []
        for _ in range(count + 1):
            groups = {group["max_lr"]: group["lr"] for group in optimizer.param_groups}
            rates[0].append(groups[settings.optim.lr])
            rates[1].append(groups[settings.optim.router_lr])
            scheduler.step(1)
        return rates


def adam_trace(model: str, options: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Of each step: weights before and after, gradients before clipping, their norm, the learning rate."""
    from btx_nemo.train.freeze import global_names

    with trainee(model, {}, {"warmup_steps": 0, "min_lr": 1e-3, **options}) as subject:
        parameters, trace = global_names(subject.gpt), []
        step, gradients = subject.optimizer.step, {}

        def spied() -> Any:
            gradients.update({name: p.main_grad.detach().clone() for name, p in parameters.items()})
            return step()

        subject.optimizer.step = spied
        for _ in range(count):
            before = {name: p.detach().clone() for name, p in parameters.items()}
            lr = subject.optimizer.param_groups[0]["lr"]
            (result,) = steps(subject, 1)
            after = {name: p.detach().clone() for name, p in parameters.items()}
            trace.append(
                {"before": before, "after": after, "gradients": dict(gradients), "lr": lr}
                | {"grad_norm": result.grad_norm}
            )
        return trace


def after_parallel_state(layout: dict[str, int]) -> list[bool]:
    """After `parallel_state`: torch.distributed still up, as it was; Megatron's groups and the platform gone."""
    import torch.distributed as dist

    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.megatron.platform import _Inert

    with parallel_state(LayoutConfig(**layout), seed=1):
        from megatron.core import parallel_state as mpu
    return [dist.is_initialized(), mpu.model_parallel_is_initialized(), torch.cuda.Stream is _Inert]


def parameter_counts(model: str) -> dict[str, int]:
    """Global name -> elements of the model that is built."""
    from btx_nemo.train.freeze import global_names

    with trainee(model, {}, {}) as subject:
        return {name: value.numel() for name, value in global_names(subject.gpt).items()}


def around_a_poisoned_step(model: str, layout: dict[str, int], rank: int, what: str) -> dict[str, Any]:
    """Of two steps, one with an infinite loss or gradient on one rank alone, and another: its result, and digests.

    With `what` "targets" that step has none, on no rank.

    `before` and `after` are of all state around the poisoned step, `end` at the end, `calm` of a run without it.
    """
    import torch.distributed as dist

    here = dist.get_rank() == rank
    with trainee(model, layout, {}) as subject:
        list(steps(subject, 2))
        before = state_digest(subject)
        hooks = []
        if here and what == "gradient":
            weight = next(p for p in subject.gpt.parameters() if p.requires_grad)
            hooks.append(weight.register_hook(lambda gradient: gradient * float("nan")))
        mask = 0.0 if what == "targets" else float("inf") if here and what == "loss" else 1.0
        (poisoned,) = steps(subject, 1, mask=mask)
        for hook in hooks:
            hook.remove()
        after = state_digest(subject)
        list(steps(subject, 1))
        end = state_digest(subject)
    with trainee(model, layout, {}) as subject:
        list(steps(subject, 3))
        calm = state_digest(subject)
    facts = {"ok": poisoned.ok, "finite": poisoned.finite, "empty": poisoned.empty, "loss": poisoned.loss}
    return {**facts, "before": before, "after": after, "end": end, "calm": calm}


def state_digest(subject: Any) -> str:
    """Of every bit of the weights, buffers, optimizer and schedule of this rank."""
    import hashlib

    digest = hashlib.sha256()
    for name, value in subject.gpt.state_dict().items():
        if isinstance(value, torch.Tensor):
            digest.update(name.encode() + value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    for part in subject.optimizer.chained_optimizers:
        for state in part.optimizer.state.values() if part.optimizer else ():
            for key, value in sorted(state.items()):
                digest.update(key.encode() + value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    digest.update(repr(subject.scheduler.state_dict()).encode())
    return digest.hexdigest()
