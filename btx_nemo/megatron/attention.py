"""What some families' attention has beyond Megatron's: a bias on the output alone, rope that layers do not share."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor


@functools.cache
def with_bias(linear: Any) -> Any:
    """A row-parallel linear layer with a bias, whatever the model's other linear layers have."""

    class WithBias(linear):  # type: ignore[misc]
        """The output projection of attention."""

        def __init__(self, *args: Any, bias: bool, **kwargs: Any):
            super().__init__(*args, bias=True, **kwargs)

    return WithBias


@functools.cache
def plain_rope_attention() -> Any:
    """Self-attention whose rope is not scaled, in a model that scales it in other layers (OLMo 3)."""
    from megatron.core.transformer.attention import SelfAttention

    class PlainRopeAttention(SelfAttention):
        """`frequencies` are the plain ones, [head_dim / 2]."""

        def __init__(self, config: Any, *args: Any, frequencies: Tensor, **kwargs: Any):
            config = copy.copy(config)
            config.softmax_scale = 1 / math.sqrt(config.kv_channels)
            super().__init__(config, *args, **kwargs)
            self.frequencies = frequencies
            self._cached: Tensor | None = None

        def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
            """As Megatron's, but for the angles."""
            return super().forward(hidden_states, *args, rotary_pos_emb=self._angles(rotary_pos_emb), **kwargs)

        def _angles(self, given: Any) -> Tensor:
            """Plain angles [S, 1, 1, head_dim] for as many positions as the model's own."""
            assert isinstance(given, Tensor), "rope that is packed or fused"
            if self._cached is None or self._cached.shape != given.shape or self._cached.device != given.device:
                positions = torch.arange(given.shape[0], device=given.device, dtype=torch.float32)
                angles = torch.outer(positions, self.frequencies.to(given.device))
                self._cached = torch.cat((angles, angles), dim=-1)[:, None, None, :]
            return self._cached

    return PlainRopeAttention
