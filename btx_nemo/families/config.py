"""What a model is, independent of any framework: the one description that all parts of the project share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixture: how many experts, and the rule that routes tokens to them."""

    num_experts: int
    """Routed experts per layer, N."""
    top_k: int = 2
    """Experts that each token is sent to."""
    router: str = "top_k"
    """Name in the router registry (`btx_nemo.routers`)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The routing rule's own settings: the fields of its router's `Options`."""
    shared_expert_intermediate_size: int | None = None
    """Width of a further feed-forward block that every token passes (Nexus); None or 0 for none."""
    shared_expert_gate: bool = False
    """Whether the shared expert's output is weighted by sigmoid(w . x), as in Qwen2Moe."""
    experts: list[str] = field(default_factory=list)
    """Names of the experts in order, for reports (`math`, `code`, ...); empty when unknown."""
    layers: list[int] | None = None
    """The layers that are mixtures, ascending, counted from 0; the others are dense. None: all are."""
    dense_ffn_hidden_size: int | None = None
    """Width of the dense layers' feed-forward blocks, where `layers` leaves any; None: that of an expert."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder-only language model; dense when `moe` is None."""

    family: str = "llama"
    """Name in the family registry (`btx_nemo.families`)."""
    num_layers: int
    """Transformer layers, L."""
    hidden_size: int
    """Model width, H."""
    ffn_hidden_size: int
    """Width of one feed-forward block (of one expert, in a mixture), F."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int
    """Key and value heads (grouped-query attention)."""
    head_dim: int
    """Size of one head; usually H / heads."""
    vocab_size: int
    """Rows of the embedding."""
    max_position_embeddings: int = 2048
    """Longest sequence the model was made for."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    rope_scaling: dict[str, Any] | None = None
    """Hugging Face's rope scaling without theta, e.g. {"rope_type": "llama3", "factor": 8.0, ...}; None: plain RoPE."""
    attention_bias: str = "none"
    """Biases of the attention's projections: `none`, `qkv` (queries, keys, values) or `all` (also the output's)."""
    qk_norm: str = "none"
    """RMSNorm of queries and keys: `none`, `head` (over each head, Qwen3) or `full` (over all heads at once, OLMo)."""
    post_norm: bool = False
    """Whether the norms come after attention and after the feed-forward block (OLMo 2 and 3), not before them."""
    sliding_window: int | None = None
    """Positions that a token attends to in layers with a sliding window, itself counted; None: all before it."""
    layer_types: list[str] | None = None
    """Per layer `full_attention` or `sliding_attention`. None: all full, or all sliding where there is a window."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""
    init_std: float = 0.02
    """Standard deviation of fresh weights."""
    moe: MoEConfig | None = None
    """The mixture, or None for a dense model."""

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.moe is not None and (self.moe.layers is None or layer in self.moe.layers)

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer attends to a sliding window only."""
        return self.sliding_window is not None and (self.layer_types is None or self.layer_types[layer] == SLIDING)
