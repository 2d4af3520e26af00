"""Settings of Megatron's own router: what ours does not obey is refused, never ignored."""

from __future__ import annotations

from typing import Any

from btx_nemo.errors import UserError
from btx_nemo.families.config import MoEConfig

FOREIGN: dict[str, tuple[Any, ...]] = {
    "moe_router_load_balancing_type": ("none",),
    "moe_aux_loss_coeff": (0, 0.0),
    "moe_z_loss_coeff": (0.0,),
    "moe_input_jitter_eps": (0.0,),
    "moe_router_dtype": ("fp32",),
    "moe_router_fusion": (False,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (1.0,),
    "moe_router_topk_limited_devices": (),
    "moe_router_num_groups": (),
    "moe_router_group_topk": (),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (),
    "moe_enable_routing_replay": (False,),
    "moe_token_dropping": (False,),
    "moe_expert_rank_capacity_factor": (),
    "moe_pad_expert_input_to_capacity": (False,),
}
"""Settings of Megatron's own router that ours does not obey, with the values (beside None) that ask for nothing."""


def check_megatron(config: Any, kind: Any, moe: MoEConfig) -> None:
    """Raises UserError when a TransformerConfig asks for what a router of class `kind` does not do."""
    for name, nothing in FOREIGN.items():
        value = getattr(config, name, None)
        if value is not None and value not in nothing:
            raise UserError(f"{name}={value} is not supported by the routers of btx_nemo; leave it")
    needed = {
        "moe_expert_capacity_factor": 1.0 if kind.variable_selection else None,
        "moe_router_topk": kind.experts_per_token(moe),
        "num_moe_experts": moe.num_experts,
    }
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise UserError(
                f"{name}={getattr(config, name)}: moe.router={moe.router} needs {value} here; a capacity or a number "
                "of experts is the router's own (moe.options.capacity_factor of switch and expert_choice, moe.top_k)"
            )
