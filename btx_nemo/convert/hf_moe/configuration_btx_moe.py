"""Configuration of `BtxMoeForCausalLM`. Needs transformers (4.57 or 5) alone: it is exported beside the weights."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

ROUTERS = (
    *("top_k", "switch", "soft", "sample_top1", "noisy_top_k"),
    *("divmoe", "nexus", "flexolmo", "expert_choice"),
)
ONE_EXPERT = ("switch", "sample_top1", "nexus")
"""Routers that send a token to one expert."""


class BtxMoeConfig(PretrainedConfig):
    """A decoder of one of several families, whose feed-forward blocks are experts behind one of several routers."""

    model_type = "btx_moe"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 512,
        intermediate_size: int = 1024,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 8,
        num_key_value_heads: int = 8,
        head_dim: int = 64,
        max_position_embeddings: int = 2048,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        attention_dropout: float = 0.0,
        # The family.
        family: str = "llama",
        attention_bias: str = "none",  # none, qkv, or all (the output's too)
        qk_norm: str = "none",  # none, head (over each head), or full (over all heads at once)
        post_norm: bool = False,  # norms after attention and feed-forward block, not before
        sliding_window: int | None = None,
        layer_types: list[str] | None = None,  # full_attention or sliding_attention; None: all the one or the other
        rope_theta: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        rope_parameters: dict[str, Any] | None = None,  # transformers 5's spelling of both
        rope_scaling_full_attention_only: bool = False,  # OLMo 3: plain RoPE in layers with a sliding window
        # The mixture.
        num_experts: int = 4,
        num_experts_per_tok: int = 2,
        router: str = "top_k",
        router_options: dict[str, Any] | None = None,
        shared_expert_intermediate_size: int | None = None,
        shared_expert_gate: bool = False,  # whether it is weighted by sigmoid(w . x)
        moe_layers: list[int] | None = None,  # None: all
        dense_intermediate_size: int | None = None,  # of the other layers; None: that of an expert
        expert_names: list[str] | None = None,
        output_router_logits: bool = False,
        router_aux_loss_coef: float = 0.0,
        **kwargs: Any,
    ):
        if router not in ROUTERS:
            raise ValueError(f"router={router!r}: unknown; known: {', '.join(ROUTERS)}")
        if router in ONE_EXPERT and num_experts_per_tok != 1:
            raise ValueError(
                f"router={router!r} sends a token to one expert, not num_experts_per_tok={num_experts_per_tok}"
            )
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.head_dim = num_key_value_heads, head_dim
        self.max_position_embeddings, self.rms_norm_eps = max_position_embeddings, rms_norm_eps
        self.initializer_range, self.use_cache, self.attention_dropout = initializer_range, use_cache, attention_dropout
        self.family, self.attention_bias, self.qk_norm, self.post_norm = family, attention_bias, qk_norm, post_norm
        self.sliding_window = sliding_window
        if layer_types is not None:  # generate() takes one that is None for a list
            self.layer_types = layer_types
        self.rope_scaling_full_attention_only = rope_scaling_full_attention_only
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.router, self.router_options = router, dict(router_options or {})
        self.shared_expert_intermediate_size = shared_expert_intermediate_size
        self.shared_expert_gate = shared_expert_gate
        self.moe_layers, self.dense_intermediate_size = moe_layers, dense_intermediate_size
        self.expert_names = list(expert_names or [])
        self.output_router_logits, self.router_aux_loss_coef = output_router_logits, router_aux_loss_coef

        # transformers 4 reads rope_theta and rope_scaling, 5 reads rope_parameters; a file that either saves has to be
        # read by the other.
        rope = dict(rope_parameters or rope_scaling or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        self.rope_theta = float(rope.pop("rope_theta", rope_theta))
        if not hasattr(type(self), "rope_scaling"):  # in 5 it is an old name of rope_parameters
            self.rope_scaling = None if rope["rope_type"] == "default" else rope
        self.rope_parameters = {**rope, "rope_theta": self.rope_theta}
        super().__init__(**{"tie_word_embeddings": tie_word_embeddings, **kwargs})
        self.tie_word_embeddings = tie_word_embeddings

    def attention_types(self) -> list[str]:
        """full_attention or sliding_attention, for each layer."""
        default = "full_attention" if self.sliding_window is None else "sliding_attention"
        return list(getattr(self, "layer_types", None) or [default] * self.num_hidden_layers)

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.moe_layers is None or layer in self.moe_layers
