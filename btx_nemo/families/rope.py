"""Frequencies of the rotary embedding, as the Hugging Face reference computes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig

SCALED_IN_FULL_LAYERS = ("olmo3",)
"""Families that scale rope only in layers with full attention."""


def scales_rope_by_layer(config: ModelConfig) -> bool:
    """Whether `rope_scaling` applies only to layers with full attention."""
    return config.family in SCALED_IN_FULL_LAYERS


def scales_rope(config: ModelConfig, layer: int) -> bool:
    """Whether `rope_scaling` applies to a layer."""
    return config.rope_scaling is not None and not (scales_rope_by_layer(config) and config.is_sliding(layer))


def plain_frequencies(config: ModelConfig) -> Tensor:
    """fp32 [head_dim / 2], without scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return 1.0 / (config.rope_theta**exponents)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """fp32 [head_dim / 2], scaled by "linear", "llama3" (Llama 3.1's piecewise rule) or "yarn" where config says so.

    Raises UserError for another kind of scaling.
    """
    frequencies, scaling = plain_frequencies(config), config.rope_scaling
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    if kind == "yarn":
        return _yarn(frequencies, scaling, config)
    raise UserError(f"rope_scaling: rope_type {kind!r} is not supported; known: linear, llama3, yarn")


def attention_factor(config: ModelConfig) -> float:
    """What scaled layers multiply the rotary embedding by: 1, but for YaRN (arXiv 2309.00071, section 3.4)."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return _mscale(scaling["factor"], numerator) / _mscale(scaling["factor"], denominator)
    return _mscale(scaling["factor"], 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (length / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / factor, frequencies)
    medium = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(medium, between, scaled)


def _yarn(frequencies: Tensor, scaling: dict[str, Any], config: ModelConfig) -> Tensor:
    """Fast dimensions as they are, slow ones divided by the factor, a ramp between (section 3.2)."""
    size, length = config.head_dim, scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    # transformers looks for `truncate` beside the tables of OLMo 3's two kinds of layers, and so never finds it there.
    if scales_rope_by_layer(config) or scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    slow = ramp.clamp(0, 1)
    return frequencies / scaling["factor"] * slow + frequencies * (1 - slow)
