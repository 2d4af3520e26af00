"""Settings of the narrow number formats: fp16's loss scale, and FP8."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Megatron's dynamic loss scale, for precision=fp16: a step whose gradients overflow is skipped."""

    initial: float = 65536.0
    """Where the scale starts."""
    min: float = 1.0
    """It does not fall below."""
    window: int = 1000
    """Steps without overflow after which it doubles."""
    hysteresis: int = 2
    """Overflows after which it halves."""


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Matrix products in 8 bits, by Transformer Engine; routers stay fp32, weights are kept in bf16."""

    format: str | None = None
    """e4m3, hybrid (e5m2 for gradients), or null for none."""
    recipe: str = "delayed"
    """How values are scaled: delayed (by their history), tensorwise, blockwise or mxfp8."""
    amax_history_len: int = 1024
    """Steps of that history."""
    amax_compute: str = "max"
    """What of it counts: max or most_recent."""
    margin: int = 0
    """Powers of two that are left free above the largest value."""
    wgrad: bool = True
    """Whether the weights' gradients are computed in 8 bits, too."""
    first_last_bf16: bool = False
    """Leave the first and last layers in bf16; not with recipe=delayed."""
    first_bf16: int = 1
    """How many of the first."""
    last_bf16: int = 1
    """How many of the last."""
    pad_routing: bool = False
    """Fill up each expert's tokens by routing others to it with a gate of zero, instead of a copy inside the layer."""
