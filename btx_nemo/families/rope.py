"""Inverse frequencies of the rotary embedding, as the Hugging Face reference computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """fp32 [head_dim / 2]: plain RoPE, or scaled by "linear" or "llama3" (Llama 3.1's piecewise rule).

    Raises UserError for another kind of scaling, which may also scale the attention.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise UserError(f"rope_scaling: rope_type {kind!r} is not supported; known: linear, llama3")


def _llama3(frequencies: Tensor, scaling: dict) -> Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (length / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / factor, frequencies)
    medium = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(medium, between, scaled)
