"""The average of the weights as a run takes it, and the weights that it is of, for the pool of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def averages(
    model: str, layout: dict[str, int], options: dict[str, Any], count: int, bombs: Sequence[int] = ()
) -> dict[str, Any]:
    """Of `count` steps, those that `bombs` number with an infinite gradient on the first rank:

    `ok` of each step; `moved`: whether the average had other bits after it; `kept`: numbers of the average on this
    rank; `found`: its tensors as a checkpoint gets them; `trace`: the fp32 weights of the same, by Megatron's own
    checkpoint of the optimizer, after each step that was taken; `writes`: numbers of the model of which this is the
    first of the data-parallel ranks.
    """
    import torch.distributed as dist

    from btx_testing.train_jobs import steps, trainee

    with trainee(model, layout, options) as subject:
        weight, bomb = next(p for p in subject.gpt.parameters() if p.requires_grad), [0.0]
        weight.register_hook(lambda gradient: gradient + bomb[0])
        ok, moved, trace = [], [], []
        for number in range(count):
            bomb[0] = math.inf if number in bombs and dist.get_rank() == 0 else 0.0
            before = [value.clone() for value in subject.average._averages]
            (result,) = steps(subject, 1)
            ok.append(result.ok)
            moved.append(not all(map(torch.equal, before, subject.average._averages)))
            if result.ok:
                trace.append(_weights(subject))
        found = subject.average.sharded_state(_model_state(subject), (), loading=False)
        return {
            "ok": ok,
            "moved": moved,
            "kept": sum(value.numel() for value in subject.average._averages),
            "found": [(state.key.removeprefix("ema."), state.data) for state in found.values()],
            "trace": trace,
            "writes": sum(p.numel() for p in subject.gpt.parameters() if _is_first(p)),
        }


def _is_first(parameter: torch.nn.Parameter) -> bool:
    from megatron.core import parallel_state as mpu

    if getattr(parameter, "allreduce", True):
        return mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    return mpu.get_expert_data_parallel_rank() == 0


def _model_state(subject: Any) -> dict[str, Any]:
    from btx_nemo.megatron.load import METADATA

    return subject.gpt.sharded_state_dict(metadata=dict(METADATA))


def _weights(subject: Any) -> list[tuple[str, torch.Tensor]]:
    """(key of the weight, its fp32 value) of all that train and of which this is the first data-parallel rank."""
    from btx_nemo.megatron.load import METADATA
    from btx_nemo.train.optimizer_state import sharded_optimizer_state

    metadata = {**METADATA, "distrib_optim_fully_reshardable_mem_efficient": True}
    states = sharded_optimizer_state(subject.optimizer, _model_state(subject), (), loading=False, metadata=metadata)
    prefix = "optimizer.state.param."
    return [
        (tensors["param"].key.removeprefix(prefix), tensors["param"].data.clone())
        for part, of_part in states.items()
        if isinstance(part, int) and of_part is not None
        for tensors in of_part.values()
    ]
