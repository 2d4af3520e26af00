"""Bounds on what a settings file may claim, so that a damaged one is refused instead of keeping a process busy."""

from __future__ import annotations

import math

from btx_nemo.errors import UserError
from btx_nemo.families.config import FULL, SLIDING, ModelConfig, MoEConfig

LARGEST = {
    "num_layers": 4096,
    "hidden_size": 1 << 24,
    "ffn_hidden_size": 1 << 24,
    "num_attention_heads": 4096,
    "num_query_groups": 4096,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 28,
    "max_position_embeddings": 1 << 40,
}
KINDS = {"attention_bias": ("none", "qkv", "all"), "qk_norm": ("none", "head", "full")}
LAYER_TYPES = (FULL, SLIDING)
MOST_BLOCKS = 1 << 18
"""Feed-forward blocks: layers times experts."""


def check_sizes(config: ModelConfig, where: str) -> ModelConfig:
    """The model itself when every size is possible. Raises UserError naming the one that is not."""
    for name, largest in LARGEST.items():
        value = getattr(config, name)
        if type(value) is not int or not 0 < value <= largest:
            raise UserError(f"{where}: {name}={value!r} must be a whole number from 1 to {largest}")
    if config.num_attention_heads % config.num_query_groups:
        raise UserError(
            f"{where}: num_query_groups={config.num_query_groups} does not divide "
            f"num_attention_heads={config.num_attention_heads}; choose a divisor"
        )
    for name in ("norm_eps", "rope_theta", "init_std"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{where}: {name}={value!r} must be a positive number")
    _check_layers(config, where)
    if config.moe:
        count, top_k = config.moe.num_experts, config.moe.top_k
        if count < 1 or count * config.num_layers > MOST_BLOCKS:
            raise UserError(f"{where}: num_experts={count} is not possible with {config.num_layers} layers")
        _check_mixture(config, config.moe, where)
        if not 0 < top_k <= count:
            raise UserError(f"{where}: top_k={top_k} must be from 1 to the {count} experts")
        if config.moe.experts and len(config.moe.experts) != count:
            raise UserError(f"{where}: names {len(config.moe.experts)} experts but num_experts={count}")
    return config


def _check_layers(config: ModelConfig, where: str) -> None:
    for name, known in KINDS.items():
        if getattr(config, name) not in known:
            raise UserError(f"{where}: {name}={getattr(config, name)!r} must be one of {', '.join(known)}")
    window, types = config.sliding_window, config.layer_types
    if window is not None and not 0 < window <= LARGEST["max_position_embeddings"]:
        raise UserError(f"{where}: sliding_window={window!r} must be a positive whole number")
    if types is not None and (len(types) != config.num_layers or not {*types} <= {*LAYER_TYPES}):
        raise UserError(
            f"{where}: layer_types must name each of the {config.num_layers} layers {' or '.join(LAYER_TYPES)}"
        )


def _check_mixture(config: ModelConfig, moe: MoEConfig, where: str) -> None:
    for name in ("shared_expert_intermediate_size", "dense_ffn_hidden_size"):
        value = getattr(moe, name)
        if value is not None and not 0 <= value <= LARGEST["ffn_hidden_size"]:
            raise UserError(f"{where}: {name}={value!r} must be a whole number from 0 to {LARGEST['ffn_hidden_size']}")
    layers = moe.layers
    if layers is not None and (not layers or layers != sorted({*layers} & {*range(config.num_layers)})):
        raise UserError(f"{where}: layers={layers} must be numbers of the {config.num_layers} layers, ascending")
