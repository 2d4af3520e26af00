"""What the optimizer of a training run has, and gives to a checkpoint, for the pool of ranks."""

from __future__ import annotations

from typing import Any

from btx_testing.train_jobs import steps, trainee


def trained(model: str, layout: dict[str, int], options: dict[str, Any], count: int) -> dict[str, Any]:
    """After `count` steps: this rank's parameters, main weights and moments; numbers of its optimizer, and on the host.

    `on_host` is what Megatron's offloaded optimizer took off the device.
    """
    from btx_nemo.train.freeze import global_names
    from btx_nemo.train.optimizer_state import main_weight, optimizers, owned

    with trainee(model, layout, options) as subject:
        list(steps(subject, count))
        names = {parameter: name for name, parameter in global_names(subject.gpt).items()}
        state, total, on_host = {}, 0, 0
        for part in optimizers(subject.optimizer):
            on_host += sum(copy.numel() for copy in getattr(part.optimizer, "gpu_params_map_cpu_copy", {}).values())
            for _, parameter, _ in owned(part):
                found = part._get_main_param_and_optimizer_states(parameter)
                total += found["param"].numel()
                assert found["param"] is main_weight(part, parameter)
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    state[f"{names[parameter]} {key}"] = found[key].detach().clone()
        parameters = {name: value.detach().clone() for name, value in global_names(subject.gpt).items()}
        return {"parameters": parameters, "state": state, "total": total, "on_host": on_host}


def state_to_save(model: str, layout: dict[str, int], options: dict[str, Any], gather_on_first: bool) -> dict[str, int]:
    """Numbers that this rank holds beside the model while a checkpoint is saved: of the optimizer's state, averages."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    from btx_nemo.train.checkpoint import state_of

    with trainee(model, layout, options) as subject:
        state = state_of(subject, {}, optimizer=True, loading=False, gather_on_first=gather_on_first)
        held = {}
        for name in ("optimizer_parts", "averages"):
            pieces = [p.data for p in nested_values(state.get(name, {})) if isinstance(p, ShardedBase)]
            held[name] = sum({piece.data_ptr(): piece.numel() for piece in pieces}.values())
        return held
