"""Rope in config.json <-> (theta, scaling), in the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from btx_nemo.errors import UserError
from btx_nemo.families.config import FULL, SLIDING
from btx_nemo.families.settings import flag, number

ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Rope scalings that the families hold, with the settings that each needs and those that it may have."""
Scaling = dict[str, Any]


def read_rope(config: Mapping[str, Any], where: str, default_theta: float) -> tuple[float, Scaling | None]:
    """(theta, scaling without theta or None), from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    Raises UserError when the two spellings contradict each other or the scaling is not known.
    """
    parameters = _table(config, "rope_parameters", where)
    old = _table(config, "rope_scaling", where)
    stated = [table for table in (parameters, old, config) if table is not None and "rope_theta" in table]
    thetas = [None if table["rope_theta"] is None else number(table, "rope_theta", where) for table in stated]
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


def read_rope_by_layer(
    config: Mapping[str, Any], where: str, default_theta: float, *, sliding: bool
) -> tuple[float, Scaling | None]:
    """The same of OLMo 3, which scales in its layers with full attention only; `sliding`: whether it has others.

    transformers 5 nests `rope_parameters` by kind of layer.
    """
    parameters = _table(config, "rope_parameters", where)
    if parameters is None or not {FULL, SLIDING} & parameters.keys():
        theta, scaling = read_rope(config, where, default_theta)
        if sliding and parameters is None and theta != default_theta:
            # transformers 4 means both kinds of layers; 5 gives those with a window its default, without a word.
            raise UserError(
                f"{where}: rope_theta={theta:g} without rope_parameters is read differently by transformers 4 and 5 "
                f"where layers have a sliding window; state rope_parameters for {FULL} and {SLIDING}"
            )
        return theta, scaling
    # A theta beside the nested tables is a transformers 4 reader's: it has to be theirs.
    common = {key: config[key] for key in ("rope_theta", "rope_scaling") if config.get(key) is not None}
    theta, scaling = read_rope({**common, "rope_parameters": parameters.get(FULL) or {}}, where, default_theta)
    plain = {"rope_parameters": parameters.get(SLIDING) or {}}
    other = read_rope(plain, where, default_theta)
    if sliding and other != (theta, None):
        raise UserError(
            f"{where}: rope_parameters of {SLIDING} are theta={other[0]:g} and scaling={other[1]}; "
            f"only theta={theta:g}, that of {FULL}, without scaling is supported"
        )
    return theta, scaling


def write_rope(theta: float, scaling: Scaling | None, *, by_layer: bool = False) -> dict[str, Any]:
    """Settings in both spellings."""
    parameters = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
    plain = {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {FULL: parameters, SLIDING: plain} if by_layer else parameters,
    }


def _table(config: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any] | None:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{where}: {key} must be a table or null, not {value!r}")
    return value


def _scaling(value: Mapping[str, Any], where: str) -> Scaling | None:
    kind = value.get("rope_type", value.get("type", "default"))
    if value.get("partial_rotary_factor", 1) not in (1, 1.0, None):
        raise UserError(f"{where}: partial_rotary_factor={value['partial_rotary_factor']} is not supported; only 1")
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(f"{where}: rope scaling {kind!r} is not supported; known: default, {', '.join(ROPE_TYPES)}")
    needed, optional = ROPE_TYPES[kind]
    result: Scaling = {"rope_type": kind}
    for key in (*needed, *(key for key in optional if value.get(key) is not None)):
        result[key] = flag(value, key, where) if key == "truncate" else number(value, key, where)
        if key == "original_max_position_embeddings":
            result[key] = int(result[key])
    return result
