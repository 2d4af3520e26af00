"""The state of Megatron's distributed optimizer in a checkpoint: moments, main weights, loss scale, at any layout.

Megatron's own `sharded_state_dict` stores more: the parameter groups, which differ between layouts (a mixture has a
second optimizer once experts are spread over ranks), and which the configuration and the schedule give anyway. Without
Apex and Transformer Engine it also fails for an optimizer that took no step, and cannot load what it saved. So we use
the layer below it, in which a key is a parameter's name in the whole model and tells nothing of the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from btx_nemo.megatron.compat import chained


def sharded_optimizer_state(
    optimizer: Any, model_state: dict[str, Any], frozen: Sequence[Any], *, loading: bool, metadata: dict[str, Any]
) -> dict[Any, Any]:
    """ShardedTensors of each optimizer's moments and main weights, on this rank, by its number. Collective.

    `model_state` is the model's sharded state dict, whose tensors are the parameters themselves; `frozen` is what
    `of_frozen_experts` says of it.
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
    # Nothing reads them, so that those of one shape can be one tensor, which a load may fill with anything.
    zeros = {piece.data.shape: torch.zeros(piece.data.shape) for piece in frozen}
    of_frozen = [
        make_sharded_optimizer_tensor(piece, zeros[piece.data.shape], f"optimizer.state.{key}")
        for piece in frozen
        for key in ("param", "exp_avg", "exp_avg_sq")
    ]
    return {**state, "frozen": dict(enumerate(of_frozen)), **({"loss_scale": scale} if scale else {})}


def of_frozen_experts(optimizer: Any, model_state: dict[str, Any]) -> list[Any]:
    """What this rank writes of frozen experts where others of their layer train, as `model_state` has it. Collective.

    A checkpoint has a layer's experts as one tensor, of which no part may be missing.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

    in_optimizer = {id(p) for part in optimizers(optimizer) for buffer in part.buffers for p in buffer.param_index_map}
    pieces = [v for v in nested_values(model_state) if isinstance(v, (ShardedTensor, ShardedTensorFactory))]
    frozen = [p for p in pieces if isinstance(p.data, torch.nn.Parameter) and not p.data.requires_grad]
    trained: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(trained, {piece.key for piece in pieces if id(piece.data) in in_optimizer})
    keys = set().union(*trained)
    return [piece for piece in frozen if piece.key in keys and is_main_replica(piece.replica_id)]


@torch.no_grad()
def load_optimizer_state(optimizer: Any, states: dict[Any, Any], *, steps: int) -> None:
    """Takes what `sharded_optimizer_state` described and a checkpoint filled; `steps` is the number of steps taken."""
    for scaler in _scalers(optimizer):
        _set_loss_scale(scaler, states["loss_scale"])
    for number, part in enumerate(optimizers(optimizer)):
        for index, parameter, where in owned(part):
            here = part._get_main_param_and_optimizer_states(parameter)
            for key, whole in states[number][index].items():
                here[key].copy_(whole.flatten()[where])
        for inner in _inner(part):
            by_weight = _counts_by_weight(inner)
            for group in inner.param_groups:
                if by_weight:
                    for weight in group["params"]:
                        inner.state[weight]["step"].fill_(steps)
                else:
                    group["step"] = steps


def agree_on_loss_scale(optimizer: Any) -> None:
    """After a step: gives every part the loss scale of those that saw an overflow; nothing without a loss scale.

    A mixture has an optimizer for its experts and one for the rest, each with a scale of its own that only its own
    gradients lower. Megatron multiplies the loss by the first's and would divide the experts' gradients by another.
    """
    parts = [part for part in chained(optimizer) if getattr(part, "grad_scaler", None) is not None]
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
    return [part.grad_scaler for part in chained(optimizer) if getattr(part, "grad_scaler", None) is not None]


def optimizers(optimizer: Any) -> list[Any]:
    """The distributed optimizers of this rank: one, one more for spread experts, none where all is frozen."""
    return [part for part in chained(optimizer) if getattr(part, "optimizer", None) is not None]


def owned(part: Any) -> Iterator[tuple[int, torch.nn.Parameter, slice]]:
    """Each parameter that this rank updates: its number in the part, and which of its elements are this rank's."""
    for number, parameter in enumerate(p for buffer in part.buffers for p in buffer.param_index_map):
        if (where := range_of(part, parameter)) is not None:
            yield number, parameter, where


def range_of(part: Any, parameter: torch.nn.Parameter) -> slice | None:
    """Which elements of a parameter, flat, this rank updates in `part`; None where it is no business of either."""
    if parameter not in part.model_param_group_index_map:
        return None
    where = part._get_model_param_range_map(parameter)["param"]
    return slice(where.start, where.end)


def main_weight(part: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The fp32 weights that AdamW updates, flat: what `owned` says of the parameter."""
    group, order = part.model_param_group_index_map[parameter]
    mine = part.optimizer.param_groups[group]["params"][order]
    return part.optimizer.param_to_inner_param[mine] if is_offloaded(part) else mine


def is_offloaded(part: Any) -> bool:
    """Whether it is Megatron's HybridDeviceOptimizer, which has a part of its weights and moments on the host."""
    return hasattr(part.optimizer, "sub_optimizers")


@torch.no_grad()
def sync_main_weights(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Lets an offloaded optimizer go on from fp32 weights that changed outside of it; others hold these themselves."""
    for part in filter(is_offloaded, optimizers(optimizer)):
        for parameter in parameters:
            if (where := range_of(part, parameter)) is not None:
                main_weight(part, parameter).copy_(parameter.flatten()[where])


def _inner(part: Any) -> list[Any]:
    """Those that take the steps: on the host and on the device, or the only one."""
    return part.optimizer.sub_optimizers if is_offloaded(part) else [part.optimizer]


def _allocate(part: Any) -> None:
    """What AdamW does at its first step: an optimizer that took none has nothing to save, nor a place to load to."""
    for inner in _inner(part):
        by_weight = _counts_by_weight(inner)
        for group in inner.param_groups:
            for weight in group["params"]:
                state = inner.state[weight]
                for moment in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(moment, torch.zeros_like(weight.data))
                if by_weight:
                    where = weight.device if group.get("fused") else "cpu"
                    state.setdefault("step", torch.zeros((), device=where))
    if is_offloaded(part):
        part.optimizer._sync_sub_optimizers_state_to_hdo()


def _counts_by_weight(inner: Any) -> bool:
    """Whether it is torch's AdamW, which Megatron takes where Apex and Transformer Engine are absent, and on the host:
    it counts steps by the weight, and not by the group."""
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))
