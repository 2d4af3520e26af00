"""The state of Megatron's distributed optimizer in a checkpoint: moments and main weights, at any layout.

Megatron's own `sharded_state_dict` stores more: the parameter groups, which differ between layouts (a mixture has a
second optimizer once experts are spread over ranks), and which the configuration and the schedule give anyway. Without
Apex and Transformer Engine it also fails for an optimizer that took no step, and cannot load what it saved. So we use
the layer below it, in which a key is a parameter's name in the whole model and tells nothing of the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def sharded_optimizer_state(
    optimizer: Any, model_state: dict[str, Any], *, loading: bool, metadata: dict[str, Any]
) -> list[Any]:
    """ShardedTensors of each optimizer's moments and main weights, on this rank. Collective.

    `model_state` is the model's sharded state dict, whose tensors are the parameters themselves.
    """
    for part in _parts(optimizer):
        _allocate(part)
    return [
        part.sharded_param_state_fully_reshardable(model_state, is_loading=loading, metadata=metadata)
        for part in _parts(optimizer)
    ]


def load_optimizer_state(optimizer: Any, states: list[Any], *, steps: int) -> None:
    """Takes what `sharded_optimizer_state` described and a checkpoint filled; `steps` is the number of steps taken."""
    for part, state in zip(_parts(optimizer), states):
        moments = list(_torch_moments(part))
        for moment in moments:  # Megatron looks for a tensor for every entry, and has none for the step counter
            del moment["step"]
        part.load_parameter_state_from_fully_reshardable(state)
        for moment in moments:
            moment["step"] = torch.tensor(float(steps))
        if not moments:  # Apex and Transformer Engine count in the group
            for group in part.optimizer.param_groups:
                group["step"] = steps


def _parts(optimizer: Any) -> list[Any]:
    """The distributed optimizers of this rank: one, one more for spread experts, none where all is frozen."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if getattr(part, "optimizer", None) is not None]


def _allocate(part: Any) -> None:
    """What AdamW does at its first step: an optimizer that took none has nothing to save, nor a place to load to."""
    part.init_state_fn(part.optimizer, part.config)
    for moment in _torch_moments(part):
        moment.setdefault("step", torch.tensor(0.0))


def _torch_moments(part: Any) -> Iterator[dict[str, Any]]:
    """State of each parameter in torch's AdamW, which Megatron uses where Apex and Transformer Engine are absent."""
    if isinstance(part.optimizer, _TORCH_ADAM):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield part.optimizer.state[parameter]
