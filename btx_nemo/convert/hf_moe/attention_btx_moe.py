"""Norm, rotary embedding and attention of `BtxMoeForCausalLM`.

Shape suffixes: B batch, S sequence, H hidden. Heads come second, as transformers has them: [B, heads, S, D].
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_btx_moe import BtxMoeConfig

UPDATE_TAKES = inspect.signature(Cache.update).parameters


class BtxMoeRMSNorm(nn.Module):
    """Normalises in fp32 and scales in the input's dtype, over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class BtxMoeRotary:
    """Cosines and sines of the rotary embedding. No module: nothing of it is saved, cast or initialised."""

    def __init__(self, config: BtxMoeConfig):
        self.config = config
        self.frequencies: dict[tuple[bool, torch.device], tuple[Tensor, float]] = {}

    def __call__(self, x: Tensor, positions_BS: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        scaled = kind == "full_attention" or not self.config.rope_scaling_full_attention_only
        key = (scaled, x.device)
        if key not in self.frequencies:
            self.frequencies[key] = self._frequencies(*key)
        inverse, scale = self.frequencies[key]
        with torch.autocast(x.device.type, enabled=False):
            angles = positions_BS[..., None].float() * inverse
            angles = torch.cat((angles, angles), dim=-1)
            return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

    def _frequencies(self, scaled: bool, device: torch.device) -> tuple[Tensor, float]:
        rope = self.config.rope_parameters
        if scaled and rope["rope_type"] != "default":
            return ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, device)
        size = self.config.head_dim
        exponents = torch.arange(0, size, 2, dtype=torch.int64, device=device).float() / size
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, heads, S, D] turned by angles [B, S, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def eager_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention in plain torch: [B, heads, S, D] and [B, groups, K, D] -> [B, S, heads, D], and its weights."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask[..., : key.shape[-2]]
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class BtxMoeAttention(nn.Module):
    """Grouped-query attention with rotary embedding; biases, norms and a window where the family has them."""

    def __init__(self, config: BtxMoeConfig, layer: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer, config.head_dim
        heads, groups, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.num_key_value_groups, self.scaling, self.is_causal = heads // groups, self.head_dim**-0.5, True
        sliding = config.attention_types()[layer] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden, count * self.head_dim, bias=config.attention_bias != "none")
            for count in (heads, groups, groups)
        )
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=config.attention_bias == "all")
        if config.qk_norm != "none":
            sizes = (heads, groups) if config.qk_norm == "full" else (1, 1)
            self.q_norm, self.k_norm = (BtxMoeRMSNorm(n * self.head_dim, config.rms_norm_eps) for n in sizes)

    def forward(
        self, hidden_BSH: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Any, cache: Any, places_S: Tensor,
        more: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        split = (*hidden_BSH.shape[:2], -1, self.head_dim)
        query, key, value = self.q_proj(hidden_BSH), self.k_proj(hidden_BSH), self.v_proj(hidden_BSH)
        if self.config.qk_norm == "full":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.view(split), key.view(split), value.view(split)
        if self.config.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query.transpose(1, 2), *cos_sin), rotate(key.transpose(1, 2), *cos_sin)
        value = value.transpose(1, 2)
        if cache is not None:
            takes = {"cache_kwargs": {"cache_position": places_S}} if "cache_kwargs" in UPDATE_TAKES else {}
            key, value = cache.update(key, value, self.layer_idx, **takes)
        name = self.config._attn_implementation
        attend = eager_attention if name in (None, "eager") else ALL_ATTENTION_FUNCTIONS[name]
        dropout = self.config.attention_dropout if self.training else 0.0
        out, weights = attend(
            self, query, key, value, mask, scaling=self.scaling, dropout=dropout,
            sliding_window=self.sliding_window, **more,
        )  # fmt: skip
        return self.o_proj(out.reshape(*hidden_BSH.shape[:2], -1).contiguous()), weights
