"""Attention beyond Megatron's: a bias on the output alone, rope that layers do not share, and context parallelism in
plain torch.

Shape suffixes: Q positions of this rank, S of the whole sequence, B micro-batch, G key and value heads, D head_dim.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor

from btx_nemo.megatron.parallel import positions_here
from btx_nemo.routers.ranks import Places


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
            """Plain angles [S, 1, 1, head_dim] for the same positions as the model's own."""
            assert isinstance(given, Tensor), "rope that is packed or fused"
            if self._cached is None or self._cached.shape != given.shape or self._cached.device != given.device:
                positions = positions_here(given.shape[0]).to(given.device, torch.float32)
                angles = torch.outer(positions, self.frequencies.to(given.device))
                self._cached = torch.cat((angles, angles), dim=-1)[:, None, None, :]
            return self._cached

    return PlainRopeAttention


def _hide(scores: Tensor, hidden: Tensor) -> Tensor:
    """Megatron's mask on attention's scores, without a backward pass of its own: the softmax is zero there, and so is
    its gradient. Autograd would copy the scores several times to find the same."""
    scores.data.masked_fill_(hidden, -10000.0)  # `data`: else autograd copies, for a view that has changed
    return scores


@functools.cache
def local_attention() -> Any:
    """Megatron's local core attention with a cheaper mask; to the bit the same, forwards and backwards."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LocalAttention(DotProductAttention):
        """Causal, in a sliding window where the layer has one; every position looks at one at least, itself."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.scale_mask_softmax.mask_func = _hide

    return LocalAttention


@functools.cache
def gathered_keys_attention() -> Any:
    """Megatron's local core attention for context parallelism, which it leaves to Transformer Engine alone.

    Every rank gathers the keys and values of the whole sequence (Megatron's `cp_comm_type="all_gather"`) and computes
    the rows of its own queries, so that only the scores and the queries are cut.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    class GatheredKeysAttention(local_attention()):  # type: ignore[misc]
        """Causal, in a sliding window where the layer has one. Backward adds up the gradients of keys and values."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            alone = copy.copy(config)
            alone.context_parallel_size = 1  # its own check; what it computes does not depend on it
            super().__init__(alone, *args, **kwargs)
            # It would make a window's mask by itself, for queries that begin with the first key.
            self.window, self.scale_mask_softmax.window_size = self.scale_mask_softmax.window_size, None

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
        ) -> Tensor:
            """Queries [Q, B, heads, D], keys and values [Q, B, G, D] -> [Q, B, heads * D].

            `attention_mask` is true where a position may not look, [B or 1, 1, Q, S]; it takes away from what is left.
            """
            group, heads = mpu.get_context_parallel_group(), key.shape[2]
            both = gather_from_sequence_parallel_region(torch.cat((key, value), dim=2), group=group)
            both = both[Places(group, group.size()).all(len(key)).argsort().to(both.device)]
            hidden = self._hidden_from(positions_here(len(query)).to(query.device), len(both))
            if attention_mask is not None:
                hidden = hidden | attention_mask
            key, value = both[:, :, :heads].contiguous(), both[:, :, heads:].contiguous()
            return super().forward(query, key, value, hidden, *args, **kwargs)

        def _hidden_from(self, positions_Q: Tensor, length: int) -> Tensor:
            """[1, 1, Q, S]: true at later positions, and at those before the window."""
            distance_QS = positions_Q[:, None] - torch.arange(length, device=positions_Q.device)
            hidden_QS = distance_QS < 0
            if self.window is not None:
                hidden_QS = hidden_QS | (distance_QS > self.window[0])
            return hidden_QS[None, None]

    return GatheredKeysAttention
