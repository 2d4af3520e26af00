"""`BtxMoeForCausalLM`. Needs torch and transformers (4.57 or 5) alone: it is exported beside the weights.

Differences between versions of transformers are met by what is there, not by version.
Shape suffixes: B batch, S sequence, H hidden, T = S * B tokens (by position, then by sequence), E experts, K key length.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from .configuration_btx_moe import BtxMoeConfig
from .routing_btx_moe import (
    capacity_of,
    expert_choice_selection,
    grouped_top_k_gates,
    hard_top1_gates,
    pad_rows,
    project_domains,
    soft_gates,
    top_k_gates,
    with_penalty,
    within_capacity,
)

CACHE = {"cache", "past_key_values"} & {field.name for field in dataclasses.fields(MoeModelOutputWithPast)}
"""What this transformers calls the cache."""
UPDATE_TAKES = inspect.signature(Cache.update).parameters
MASKS = {
    kind: (make, inspect.signature(make).parameters)
    for kind, make in (
        ("full_attention", create_causal_mask),
        ("sliding_attention", create_sliding_window_causal_mask),
    )
}
LOADS_BY_PATTERN = importlib.util.find_spec("transformers.core_model_loading") is not None


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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
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
    """Grouped-query attention with rotary embedding; biases, query and key norms and a window where the family has them."""

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


class BtxMoeMLP(nn.Module):
    """W_down(silu(W_gate x) * W_up x); with a gate per token, the product is scaled by it before W_down, as in Megatron."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, gates_T: Tensor | None = None) -> Tensor:
        inner = silu(self.gate_proj(x)) * self.up_proj(x)
        if gates_T is not None:
            inner = (inner * gates_T[:, None]).to(inner.dtype)
        return self.down_proj(inner)


class BtxMoeRouter(nn.Module):
    """Which experts a token is sent to, and with what weight. All of it is fp32, whatever the model's dtype."""

    def __init__(self, config: BtxMoeConfig, layer: int):
        super().__init__()
        self.kind, self.options = config.router, config.router_options
        self.experts, self.top_k, self.first = config.num_experts, config.num_experts_per_tok, layer == 0
        hidden = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.experts, hidden)}
        if self.kind == "noisy_top_k":
            shapes["noise_weight"] = (self.experts, hidden)  # of no use but in training with btx_nemo
        if self.kind == "flexolmo" and self.options.get("bias"):
            shapes["penalty"] = (self.experts - 1,)
        if self.kind == "nexus":
            size = self.options["embedding_size"]
            shapes = {"w1": (2 * hidden, size), "w2": (hidden, hidden), "domain_embeddings": (self.experts, size)}
        for name, shape in shapes.items():
            # The embeddings are constant, but no buffer: transformers 4 loads none of a layer that is put on the disk.
            trained = name != "domain_embeddings"
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=trained))
        self._cached: Tensor | None = None

    def forward(self, hidden_TH: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, gates, the selection, and what of it is carried out, all [T, E]; padding is sent nowhere."""
        with torch.autocast(hidden_TH.device.type, enabled=False):
            logits_TE = self._logits(hidden_TH.float())
            gates_TE, selected_TE = self._route(logits_TE, valid_T)
        kept_TE = selected_TE if valid_T is None else selected_TE & valid_T[:, None]
        if self.kind == "switch":
            factor = self.options.get("capacity_factor", 1.5)
            if factor:
                kept_TE = within_capacity(kept_TE, self._capacity(factor, kept_TE.shape[0], valid_T))
        return logits_TE, gates_TE, selected_TE, kept_TE

    def _logits(self, hidden_TH: Tensor) -> Tensor:
        if self.kind == "nexus":
            return (hidden_TH @ self._expert_embeddings().T)[:, : self.experts]
        logits_TE = linear(hidden_TH, self.weight)
        return logits_TE if getattr(self, "penalty", None) is None else with_penalty(logits_TE, self.penalty)

    def _route(self, logits_TE: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor]:
        option = self.options.get
        if self.kind == "soft" or (self.kind == "sample_top1" and self.first):
            return soft_gates(logits_TE)
        if self.kind == "sample_top1":
            hard = option("inference", "argmax") == "hard"
            noise = torch.empty_like(logits_TE).exponential_().log_().neg_() if hard else 0.0
            return hard_top1_gates(logits_TE + noise)
        if self.kind == "divmoe":
            return grouped_top_k_gates(logits_TE, option("groups"), self.top_k)
        if self.kind == "expert_choice":
            probs_TE = logits_TE.softmax(dim=-1)
            scores_TE = probs_TE if valid_T is None else probs_TE - 2.0 * ~valid_T[:, None]  # padding comes last
            capacity = int(self._capacity(option("capacity_factor", 2.0), len(logits_TE), valid_T))
            selected_TE = expert_choice_selection(scores_TE, capacity)
            return probs_TE * selected_TE, selected_TE
        # Noisy top-k has no noise here; switch, nexus and flexolmo take a share of the full softmax.
        before = self.kind in ("switch", "nexus", "flexolmo") or option("softmax") == "before"
        renormalise = self.kind == "top_k" and option("renormalise", True)
        return top_k_gates(logits_TE, self.top_k, softmax_before=before, renormalise=renormalise)

    def _capacity(self, factor: float, tokens: int, valid_T: Tensor | None) -> Any:
        return capacity_of(tokens if valid_T is None else valid_T.sum().clamp(min=1), self.experts, factor)

    def _expert_embeddings(self) -> Tensor:
        if self._cached is None or self.training or torch.is_grad_enabled():
            self._cached = None
            embeddings = project_domains(pad_rows(self.domain_embeddings), self.w1, self.w2)
            if self.training or torch.is_grad_enabled():
                return embeddings
            self._cached = embeddings
        return self._cached

    def train(self, mode: bool = True) -> BtxMoeRouter:
        """Forgets the cached embeddings: weights may have changed."""
        self._cached = None
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._cached = None
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves between devices; a cast of the model leaves it fp32."""
        self._cached = None

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


class BtxMoeBlock(nn.Module):
    """Router, routed experts and, for some, an expert that every token passes."""

    def __init__(self, config: BtxMoeConfig, layer: int):
        super().__init__()
        hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
        self.gate = BtxMoeRouter(config, layer)
        self.experts = nn.ModuleList(BtxMoeMLP(hidden, config.intermediate_size) for _ in range(config.num_experts))
        self.shared_expert = BtxMoeMLP(hidden, shared) if shared else None
        gated = bool(shared and config.shared_expert_gate)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if gated else None

    def forward(self, hidden_BSH: Tensor, valid_BS: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, S, H], logits and selection [B * S, E]. Tokens are taken by position first, as in Megatron."""
        batch, length = hidden_BSH.shape[:2]
        hidden_TH = hidden_BSH.transpose(0, 1).flatten(0, 1)
        valid_T = None if valid_BS is None else valid_BS.T.flatten()
        logits_TE, gates_TE, selected_TE, kept_TE = self.gate(hidden_TH, valid_T)
        out_TH = self._mix(hidden_TH, gates_TE, kept_TE)
        if self.shared_expert is not None:
            shared_TH = self.shared_expert(hidden_TH)
            if self.shared_expert_gate is not None:
                shared_TH = self.shared_expert_gate(hidden_TH).sigmoid() * shared_TH
            out_TH = out_TH + shared_TH

        def by_sequence(x_TX: Tensor) -> Tensor:
            return x_TX.unflatten(0, (length, batch)).transpose(0, 1)

        return by_sequence(out_TH), by_sequence(logits_TE).flatten(0, 1), by_sequence(selected_TE).flatten(0, 1)

    def _mix(self, hidden_TH: Tensor, gates_TE: Tensor, kept_TE: Tensor) -> Tensor:
        """Sum of the experts' outputs: the tokens of all experts in one gather and one scatter, expert by expert."""
        kept_ET = kept_TE.T
        _, token_P = kept_ET.nonzero(as_tuple=True)
        counts = kept_ET.sum(dim=1).tolist()
        inputs, gates = hidden_TH[token_P].split(counts), gates_TE.T[kept_ET].split(counts)
        outputs = [
            expert(x, g)
            for expert, x, g in zip(self.experts, inputs, gates)
            if len(x) or self.training  # in training each expert has a gradient on every rank
        ]
        out_TH = torch.zeros_like(hidden_TH)
        return out_TH.index_add(0, token_P, torch.cat(outputs).to(out_TH.dtype)) if outputs else out_TH


class BtxMoeDecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward block, each with its norm before it or (`post_norm`) after it."""

    def __init__(self, config: BtxMoeConfig, layer: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = BtxMoeAttention(config, layer)
        dense = config.dense_intermediate_size or config.intermediate_size
        self.mlp = BtxMoeBlock(config, layer) if config.is_mixture(layer) else BtxMoeMLP(hidden, dense)
        self.post_norm = config.post_norm
        self.post_attention_layernorm = BtxMoeRMSNorm(hidden, eps)
        if config.post_norm:
            self.post_feedforward_layernorm = BtxMoeRMSNorm(hidden, eps)
        else:
            self.input_layernorm = BtxMoeRMSNorm(hidden, eps)

    def forward(
        self, hidden_BSH: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Any, valid_BS: Tensor | None, cache: Any,
        places_S: Tensor, more: dict[str, Any],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Hidden states, attention weights, and a mixture's logits and selection."""
        inner = hidden_BSH if self.post_norm else self.input_layernorm(hidden_BSH)
        inner, weights = self.self_attn(inner, cos_sin, mask, cache, places_S, more)
        hidden_BSH = hidden_BSH + (self.post_attention_layernorm(inner) if self.post_norm else inner)
        inner, logits, selected = (
            hidden_BSH if self.post_norm else self.post_attention_layernorm(hidden_BSH),
            None,
            None,
        )
        if isinstance(self.mlp, BtxMoeBlock):
            inner, logits, selected = self.mlp(inner, valid_BS)
        else:
            inner = self.mlp(inner)
        hidden_BSH = hidden_BSH + (self.post_feedforward_layernorm(inner) if self.post_norm else inner)
        return hidden_BSH, weights, logits, selected


@dataclasses.dataclass
class BtxMoeModelOutput(MoeModelOutputWithPast):
    """The router's logits, and the experts that each token chose, are [B * S, E], one tensor a mixture layer."""

    selected_experts: tuple[Tensor, ...] | None = None


class BtxMoePreTrainedModel(PreTrainedModel):
    """What the models share: how weights are loaded and initialised."""

    config_class = BtxMoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BtxMoeDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    # 4.57 takes names of modules, 5 patterns, for which "gate" is in "gate_proj" too.
    _keep_in_fp32_modules_strict = [r"mlp\.gate\." if LOADS_BY_PATTERN else "gate"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but a weight that is missing is an error and not a random one."""
        model, info = super().from_pretrained(folder, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(f"{folder}: {missing[0]} is missing ({len(missing)} in all); copy the folder again")
        unused = sorted(key for key in info["unexpected_keys"] if ".layers." in f".{key}")
        if unused and getattr(model, "hf_quantizer", None) is None:
            raise ValueError(
                f"{folder}: {unused[0]} has no place in this model; is it the config.json of these weights?"
            )
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BtxMoeRouter):
            for name, value in module.named_parameters():
                if name in ("noise_weight", "penalty"):
                    nn.init.zeros_(value)
                else:
                    nn.init.normal_(value, std=self.config.initializer_range)


class BtxMoeModel(BtxMoePreTrainedModel):
    """Embedding, layers and the last norm."""

    def __init__(self, config: BtxMoeConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BtxMoeDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = BtxMoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = BtxMoeRotary(config)
        self.attention_types = config.attention_types()
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BtxMoeModelOutput:
        """See `BtxMoeForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_BSH = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        past, length = (0 if cache is None else cache.get_seq_length()), hidden_BSH.shape[1]
        if past and self.config.router == "expert_choice":
            raise ValueError("router='expert_choice' looks at all tokens of a pass: give use_cache=False")
        kwargs.pop("cache_position", None)  # transformers 4 gives what is known here
        places_S = torch.arange(past, past + length, device=hidden_BSH.device)
        positions_BS = places_S[None] if position_ids is None else position_ids
        masks = self._masks(hidden_BSH, attention_mask, cache, positions_BS, places_S)
        flat = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        valid_BS = attention_mask[:, -length:].bool() if flat else None
        kinds = set(self.attention_types)
        angles = {kind: self.rotary(hidden_BSH, positions_BS, kind) for kind in kinds}
        states, results = [hidden_BSH], []
        for layer, kind in zip(self.layers, self.attention_types):
            hidden_BSH, *rest = layer(hidden_BSH, angles[kind], masks[kind], valid_BS, cache, places_S, kwargs)
            states.append(hidden_BSH)
            results.append(rest)
        states[-1] = self.norm(hidden_BSH)
        attentions, logits, selected = zip(*results)

        def given(asked: bool | None, name: str, values: Any) -> tuple[Tensor, ...] | None:
            return (
                tuple(x for x in values if x is not None)
                if (getattr(self.config, name) if asked is None else asked)
                else None
            )

        return BtxMoeModelOutput(
            last_hidden_state=states[-1],
            hidden_states=given(output_hidden_states, "output_hidden_states", states),
            attentions=given(output_attentions, "output_attentions", attentions),
            router_logits=given(output_router_logits, "output_router_logits", logits),
            selected_experts=given(output_router_logits, "output_router_logits", selected),
            **dict.fromkeys(CACHE, cache),
        )

    def _cache(self, cache: Any, use_cache: bool | None) -> Any:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None and cache.get_seq_length():
                raise ValueError("a cache cannot be used together with gradient checkpointing")
            return None
        if cache is None and (self.config.use_cache if use_cache is None else use_cache) and not self.training:
            return DynamicCache(config=self.config)
        return cache

    def _masks(
        self, hidden_BSH: Tensor, mask: Any, cache: Any, positions_BS: Tensor, places_S: Tensor
    ) -> dict[str, Any]:
        if isinstance(mask, dict):  # made by generate(), for a static cache
            return mask
        known = {
            "config": self.config, "attention_mask": mask, "position_ids": positions_BS, "cache_position": places_S,
            "inputs_embeds": hidden_BSH, "input_embeds": hidden_BSH, "cache": cache, "past_key_values": cache,
        }  # fmt: skip
        return {
            kind: make(**{name: value for name, value in known.items() if name in takes})
            for kind, (make, takes) in MASKS.items()
            if kind in self.attention_types
        }


def balance_loss(logits: tuple[Tensor, ...], selected: tuple[Tensor, ...], mask_BS: Tensor | None) -> Tensor:
    """Switch's balance loss N sum_i f_i p_i, f the share of assignments, summed over layers; L when uniform.

    transformers' own pools the layers and is k times larger for k experts a token. Padding does not count.
    """
    total = logits[0].new_zeros(())
    for logits_TE, selected_TE in zip(logits, selected):
        weight_T1 = torch.ones_like(logits_TE[:, :1]) if mask_BS is None else mask_BS.reshape(-1, 1).to(logits_TE)
        share_E = (selected_TE * weight_T1).sum(dim=0)
        probs_E = (logits_TE.softmax(dim=-1) * weight_T1).sum(dim=0) / weight_T1.sum()
        total = total + logits_TE.shape[-1] * (share_E / share_E.sum() * probs_E).sum().to(total.device)
    return total


class BtxMoeForCausalLM(BtxMoePreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: BtxMoeConfig):
        super().__init__(config)
        self.model = BtxMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; expert choice, which looks at all tokens of a pass, does without a cache."""
        if self.config.router == "expert_choice":
            kwargs.setdefault("use_cache", False)
        return super().generate(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Logits [B, S, V], and with `labels` the loss, to which `router_aux_loss_coef` adds the balance loss.

        `output_router_logits` gives the logits [B * S, E] of each mixture layer, and the balance loss as `aux_loss`.

        `cache` is transformers 5's name of `past_key_values`. Routing follows the rule of inference in training too.
        A switch router's capacity, and expert choice, count the tokens of one call.
        """
        coefficient = self.config.router_aux_loss_coef if labels is not None else 0.0
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_router_logits=bool(output_router_logits or coefficient),
            cache=cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        if outputs.router_logits is not None:
            flat = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
            mask_BS = attention_mask[:, -outputs.last_hidden_state.shape[1] :] if flat else None
            aux_loss = balance_loss(outputs.router_logits, outputs.selected_experts, mask_BS)
            if coefficient:
                loss = loss + coefficient * aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits if output_router_logits else None,
            **{name: outputs.get(name) for name in CACHE},
        )


BtxMoeConfig.register_for_auto_class()
BtxMoeModel.register_for_auto_class("AutoModel")
BtxMoeForCausalLM.register_for_auto_class("AutoModelForCausalLM")
