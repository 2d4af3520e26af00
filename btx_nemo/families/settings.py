"""Reading single settings of a config.json: the right kind and range, or a UserError that names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from btx_nemo.errors import UserError

RENAMED = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
"""ModelConfig's names where config.json has others -> config.json's."""


def refuse_quantized(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError for quantized weights."""
    if config.get("quantization_config"):
        raise UserError(f"{where}: quantized weights are not supported; give the unquantized model")


def natural(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number above zero; `default` where config.json is silent or has null."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"{where}: {key} is missing; is this the model's config.json?")
    if type(value) is not int or not 0 < value < 1 << 40:
        raise UserError(f"{where}: {key}={value!r} must be a positive whole number")
    return value


def flag(config: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    """true or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key}={value!r} must be true or false")
    return value


def number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A number above zero."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise UserError(f"{where}: {key}={value!r} must be a positive number")
    return float(value)


def names_list(
    config: Mapping[str, Any], key: str, where: str, length: int, known: tuple[str, ...]
) -> list[str] | None:
    """A list of `length` names, each of `known`; None where config.json is silent or has null."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != length or any(entry not in known for entry in value):
        raise UserError(f"{where}: {key} must be a list of {length} names out of {', '.join(known)}")
    return list(value)
