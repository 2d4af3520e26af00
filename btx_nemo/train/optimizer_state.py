"""The state of Megatron's distributed optimizer in a checkpoint: moments, main weights, loss scale, at any layout.

Megatron's own `sharded_state_dict` stores more: the parameter groups, which differ between layouts (a mixture has a
second optimizer once experts are spread over ranks), and which the configuration and the schedule give anyway. Without
Apex and Transformer Engine it also fails for an optimizer that took no step, and cannot load what it saved. So we use
the layer below it, in which a key is a parameter's name in the whole model and tells nothing of the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def sharded_optimizer_state(
    optimizer: Any, model_state: dict[str, Any], *, loading: bool, metadata: dict[str, Any]
) -> dict[Any, Any]:
    """ShardedTensors of each optimizer's moments and main weights, on this rank, by its number. Collective.

    `model_state` is the model's sharded state dict, whose tensors are the parameters themselves.
    """
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    for part in optimizers(optimizer):
        _allocate(part)
    # By number and not as a list: ranks differ in how many they have, and Megatron merges no lists of other lengths.
    state: dict[Any, Any] = {
        number: part.sharded_param_state_fully_reshardable(model_state, is_loading=loading, metadata=metadata)
        for number, part in enumerate(optimizers(optimizer))
    }
    scale = _loss_scale_state(optimizer)
    frozen = [
        make_sharded_optimizer_tensor(
            piece, torch.zeros_like(piece.data, dtype=torch.float32), f"optimizer.state.{key}"
        )
        for piece in of_frozen_experts(optimizer, model_state)
        for key in ("param", "exp_avg", "exp_avg_sq")
    ]
    return {**state, "frozen": dict(enumerate(frozen)), **({"loss_scale": scale} if scale else {})}


def of_frozen_experts(optimizer: Any, model_state: dict[str, Any]) -> list[Any]:
    """What `model_state` has of frozen experts, on this rank, where others of their layer train. Collective.

    A checkpoint has a layer's experts as one tensor, of which no part may be missing.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    in_optimizer = {id(p) for part in optimizers(optimizer) for buffer in part.buffers for p in buffer.param_index_map}
    pieces = [v for v in nested_values(model_state) if isinstance(v, (ShardedTensor, ShardedTensorFactory))]
    trained: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(trained, {piece.key for piece in pieces if id(piece.data) in in_optimizer})
    keys = set().union(*trained)
    return [p for p in pieces if p.key in keys and isinstance(p.data, torch.nn.Parameter) and not p.data.requires_grad]


def load_optimizer_state(optimizer: Any, states: dict[Any, Any], *, steps: int) -> None:
    """Takes what `sharded_optimizer_state` described and a checkpoint filled; `steps` is the number of steps taken."""
    for scaler in _scalers(optimizer):
        _set_loss_scale(scaler, states["loss_scale"])
    for number, part in enumerate(optimizers(optimizer)):
        if not any(buffer.param_index_map for buffer in part.buffers):
            continue  # nothing of it trains on this rank; Megatron's checkpoints keep no empty tables
        moments = list(_torch_moments(part))
        for moment in moments:  # Megatron looks for a tensor for every entry, and has none for the step counter
            del moment["step"]
        part.load_parameter_state_from_fully_reshardable(states[number])
        for moment in moments:
            moment["step"] = torch.tensor(float(steps))
        if not moments:  # Apex and Transformer Engine count in the group
            for group in part.optimizer.param_groups:
                group["step"] = steps


def agree_on_loss_scale(optimizer: Any) -> None:
    """After a step: gives every part the loss scale of those that saw an overflow; nothing without a loss scale.

    A mixture has an optimizer for its experts and one for the rest, each with a scale of its own that only its own
    gradients lower. Megatron multiplies the loss by the first's and would divide the experts' gradients by another.
    """
    parts = [part for part in _all_parts(optimizer) if getattr(part, "grad_scaler", None) is not None]
    overflowed = [part for part in parts if part.found_inf.item() > 0]  # the same on all ranks
    if overflowed:
        state = overflowed[0].grad_scaler.state_dict()
        for part in parts:
            part.grad_scaler.load_state_dict(state)


def loss_scale_is_least(optimizer: Any) -> bool:
    """Whether there is a loss scale that can fall no further."""
    return any(bool(scaler.scale <= scaler.min_scale) for scaler in _scalers(optimizer))


def _loss_scale_state(optimizer: Any) -> dict[str, float]:
    """Plain numbers, the same on every rank and in every part; empty without a loss scale."""
    states = [scaler.state_dict() for scaler in _scalers(optimizer)]
    return {key: float(value) for key, value in states[0].items()} if states else {}


def _set_loss_scale(scaler: Any, state: dict[str, float]) -> None:
    scaler.load_state_dict(
        {
            "scale": torch.tensor([state["scale"]], dtype=torch.float32),
            "growth_tracker": int(state["growth_tracker"]),
            "hysteresis_tracker": int(state["hysteresis_tracker"]),
        }
    )


def _scalers(optimizer: Any) -> list[Any]:
    return [part.grad_scaler for part in _all_parts(optimizer) if getattr(part, "grad_scaler", None) is not None]


def _all_parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def optimizers(optimizer: Any) -> list[Any]:
    """The distributed optimizers of this rank: one, one more for spread experts, none where all is frozen."""
    return [part for part in _all_parts(optimizer) if getattr(part, "optimizer", None) is not None]


def owned(part: Any) -> Iterator[tuple[int, torch.nn.Parameter, slice]]:
    """Each parameter that this rank updates: its number in the part, and which of its elements are this rank's."""
    parameters = (parameter for buffer in part.buffers for parameter in buffer.param_index_map)
    ranges = {
        parameter: where["param"]
        for of_buffer in part.gbuf_ranges
        for buckets in of_buffer.values()
        for bucket in buckets
        for parameter, where in bucket["param_map"].items()
    }
    for number, parameter in enumerate(parameters):
        if parameter in ranges:
            yield number, parameter, slice(ranges[parameter].start, ranges[parameter].end)


def main_weight(part: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The fp32 weights that AdamW updates, flat: what `owned` says of the parameter."""
    group, order = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][order]


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
