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
    checkpoint of the optimizer, after each step that was taken; `model`: the model's weights then, of this rank.
    """
    import torch.distributed as dist

    from btx_testing.train_jobs import steps, trainee

    with trainee(model, layout, options) as subject:
        weight, bomb = next(p for p in subject.gpt.parameters() if p.requires_grad), [0.0]
        weight.register_hook(lambda gradient: gradient + bomb[0])
        ok, moved, trace, of_model = [], [], [], []
        for number in range(count):
            bomb[0] = math.inf if number in bombs and dist.get_rank() == 0 else 0.0
            before = [value.clone() for value in subject.average._averages]
            (result,) = steps(subject, 1)
            ok.append(result.ok)
            moved.append(not all(map(torch.equal, before, subject.average._averages)))
            if result.ok:
                trace.append(_weights(subject))
                of_model.append([p.detach().clone() for p in subject.gpt.parameters()])
        found = subject.average.sharded_state(_model_state(subject), loading=False)
        return {
            "ok": ok,
            "moved": moved,
            "kept": sum(value.numel() for value in subject.average._averages),
            "found": [(state.key.removeprefix("ema."), state.data) for state in found.values()],
            "trace": trace,
            "model": of_model,
        }


def _model_state(subject: Any) -> dict[str, Any]:
    from btx_nemo.megatron.load import METADATA

    return subject.gpt.sharded_state_dict(metadata=dict(METADATA))


def _weights(subject: Any) -> list[tuple[str, torch.Tensor]]:
    """(key of the weight, its fp32 value) of all that train."""
    from btx_nemo.megatron.load import METADATA
    from btx_nemo.train.optimizer_state import sharded_optimizer_state

    states = sharded_optimizer_state(subject.optimizer, _model_state(subject), loading=False, metadata=dict(METADATA))
    prefix = "optimizer.state.param."
    return [
        (tensors["param"].key.removeprefix(prefix), tensors["param"].data.clone())
        for part, of_part in states.items()
        if isinstance(part, int)
        for tensors in of_part.values()
    ]
