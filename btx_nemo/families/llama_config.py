"""config.json of Llama, Mistral and Mixtral <-> ModelConfig, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.families.sizes import check_sizes

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "kv_heads": None},
    "mistral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "kv_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "kv_heads": 8},
}
"""What transformers assumes where config.json is silent."""
ROPE_TYPES = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Rope scalings that this family holds, with their settings."""
ACTIVATIONS = ("silu", "swish")


def read(config: Mapping[str, Any], where: str) -> ModelConfig:
    """config.json -> ModelConfig. Raises UserError naming the setting that is missing or cannot be held."""
    kind = config["model_type"]
    defaults = DEFAULTS[kind]
    max_positions = _natural(config, "max_position_embeddings", where, defaults["max_position_embeddings"])
    _refuse_unsupported(config, where, max_positions, defaults)
    heads = _natural(config, "num_attention_heads", where)
    hidden = _natural(config, "hidden_size", where)
    if config.get("head_dim") is None and hidden % heads:
        raise UserError(f"{where}: num_attention_heads={heads} does not divide hidden_size={hidden}; give head_dim")
    theta, scaling = read_rope(config, where, defaults["rope_theta"])
    moe = None
    if kind == "mixtral":
        count = _natural(config, "num_local_experts", where, config.get("num_experts", 8))
        names = config.get("btx_experts")
        names = [str(name) for name in names] if isinstance(names, list) and len(names) == count else []
        moe = MoEConfig(num_experts=count, top_k=_natural(config, "num_experts_per_tok", where, 2), experts=names)
    model = ModelConfig(
        family="llama",
        num_layers=_natural(config, "num_hidden_layers", where),
        hidden_size=hidden,
        ffn_hidden_size=_natural(config, "intermediate_size", where),
        num_attention_heads=heads,
        num_query_groups=_natural(config, "num_key_value_heads", where, defaults["kv_heads"] or heads),
        head_dim=_natural(config, "head_dim", where, hidden // heads),
        vocab_size=_natural(config, "vocab_size", where),
        max_position_embeddings=max_positions,
        norm_eps=_number(config, "rms_norm_eps", where, defaults["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=_flag(config, "tie_word_embeddings", where),
        init_std=_number(config, "initializer_range", where, 0.02),
        moe=moe,
    )
    return check_sizes(model, where)


def _refuse_unsupported(config: Mapping[str, Any], where: str, positions: int, defaults: Mapping[str, Any]) -> None:
    for flag in ("attention_bias", "mlp_bias", "use_bias"):
        if config.get(flag):
            raise UserError(f"{where}: {flag}={config[flag]} is not supported; only models without biases are")
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UserError(f"{where}: hidden_act={activation!r} is not supported; only {' or '.join(ACTIVATIONS)}")
    window = config.get("sliding_window", defaults.get("sliding_window"))
    if window is not None and window < positions:
        raise UserError(
            f"{where}: sliding_window={window} is shorter than max_position_embeddings={positions}, which Mixtral "
            "and this trainer would not respect; set sliding_window to null or max_position_embeddings to the window"
        )
    if config.get("quantization_config"):
        raise UserError(f"{where}: quantized weights are not supported; give the unquantized model")
    if "partial_rotary_factor" in config and config["partial_rotary_factor"] not in (None, 1, 1.0):
        raise UserError(f"{where}: partial_rotary_factor={config['partial_rotary_factor']} is not supported; only 1")


def read_rope(config: Mapping[str, Any], where: str, default_theta: float) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling without theta or None), from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    Raises UserError when the two spellings contradict each other or the scaling is not known.
    """
    parameters = config.get("rope_parameters")
    old = config.get("rope_scaling")
    for value, key in ((parameters, "rope_parameters"), (old, "rope_scaling")):
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{where}: {key} must be a table or null, not {value!r}")
    stated = [table for table in (parameters, old, config) if table is not None and "rope_theta" in table]
    thetas = [None if table["rope_theta"] is None else _number(table, "rope_theta", where) for table in stated]
    if thetas and all(value is None for value in thetas):
        raise UserError(f"{where}: rope_theta=None must be a positive number; state it, or leave it out")
    theta_old = thetas.pop() if "rope_theta" in config else None
    theta_new = next((value for value in thetas if value is not None), None)
    if theta_old is not None and theta_new is not None and theta_old != theta_new:
        raise UserError(f"{where}: rope_theta={theta_old} but rope_parameters says {theta_new}; make them agree")
    theta = theta_old if theta_old is not None else theta_new if theta_new is not None else default_theta
    scalings = [_scaling(value, where) for value in (parameters, old) if value]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise UserError(f"{where}: rope_scaling={scalings[1]} but rope_parameters={scalings[0]}; make them agree")
    return theta, scalings[0] if scalings else None


def _scaling(value: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    kind = value.get("rope_type", value.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(f"{where}: rope scaling {kind!r} is not supported; known: default, {', '.join(ROPE_TYPES)}")
    result: dict[str, Any] = {"rope_type": kind}
    for key in ROPE_TYPES[kind]:
        result[key] = _number(value, key, where)
        if key == "original_max_position_embeddings":
            result[key] = int(result[key])
    if value.get("partial_rotary_factor", 1) not in (1, 1.0, None):
        raise UserError(f"{where}: partial_rotary_factor={value['partial_rotary_factor']} is not supported; only 1")
    return result


def _natural(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"{where}: {key} is missing; is this the model's config.json?")
    if type(value) is not int or not 0 < value < 1 << 40:
        raise UserError(f"{where}: {key}={value!r} must be a positive whole number")
    return value


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key}={value!r} must be true or false")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise UserError(f"{where}: {key}={value!r} must be a positive number")
    return float(value)


KEPT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "use_cache",
    "pretraining_tp",
)
"""Settings that say nothing of the architecture: passed on from the base config.json."""


def write(kind: str, config: ModelConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """ModelConfig -> config.json of model_type `kind`, in both spellings: that of transformers 4.57 and that of 5."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, **(config.rope_scaling or {})}
    result = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rope_parameters": rope,
        "torch_dtype": dtype,
        "dtype": dtype,
        **{key: base[key] for key in KEPT if key in base},
    }
    if kind == "llama":
        result |= {"attention_bias": False, "mlp_bias": False}
    else:
        result["sliding_window"] = None
    if config.moe:
        result.pop("pretraining_tp", None)
        result |= {
            "num_local_experts": config.moe.num_experts,
            "num_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.top_k,
            "router_jitter_noise": 0.0,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
        if config.moe.experts:
            result["btx_experts"] = list(config.moe.experts)
    return result
