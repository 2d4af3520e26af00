"""`BtxMoeForCausalLM`. Needs torch and transformers (4.57 or 5) alone: it is exported beside the weights.

Differences between versions of transformers are met by what is there, not by version.
Shape suffixes: B batch, S sequence, H hidden, V vocabulary, T = B * S tokens, E experts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import can_return_tuple

from .attention_btx_moe import BtxMoeAttention, BtxMoeRMSNorm, BtxMoeRotary
from .configuration_btx_moe import BtxMoeConfig
from .experts_btx_moe import BtxMoeBlock, BtxMoeMLP, BtxMoeRouter, balance_loss

# transformers 4 copies only the files that this one names.
from .routing_btx_moe import top_k_gates as _  # noqa: F401

CACHE = {"cache", "past_key_values"} & {field.name for field in dataclasses.fields(MoeModelOutputWithPast)}
"""What this transformers calls the cache."""
MASKS = {
    kind: (make, inspect.signature(make).parameters)
    for kind, make in (
        ("full_attention", create_causal_mask),
        ("sliding_attention", create_sliding_window_causal_mask),
    )
}
LOADS_BY_PATTERN = importlib.util.find_spec("transformers.core_model_loading") is not None


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
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As in transformers, but a weight that is missing is an error and not a random one."""
        folder, kwargs["output_loading_info"] = pretrained_model_name_or_path, True
        loaded: Any = super().from_pretrained(folder, *args, **kwargs)
        model, info = loaded
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
        angles = {kind: self.rotary(hidden_BSH, positions_BS, kind) for kind in set(self.attention_types)}
        asked = {
            "hidden_states": self.config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            "attentions": self.config.output_attentions if output_attentions is None else output_attentions,
            "router_logits": self.config.output_router_logits if output_router_logits is None else output_router_logits,
        }
        asked["selected_experts"] = asked["router_logits"]
        found: dict[str, tuple[Tensor, ...]] = {name: () for name, wanted in asked.items() if wanted}
        for layer, kind in zip(self.layers, self.attention_types):
            before_BSH = hidden_BSH
            hidden_BSH, *rest = layer(hidden_BSH, angles[kind], masks[kind], valid_BS, cache, places_S, kwargs)
            for name, value in zip(asked, (before_BSH, *rest)):
                if name in found and value is not None:
                    found[name] += (value,)
        hidden_BSH = self.norm(hidden_BSH)
        if "hidden_states" in found:
            found["hidden_states"] += (hidden_BSH,)
        return BtxMoeModelOutput(last_hidden_state=hidden_BSH, **found, **dict.fromkeys(CACHE, cache))  # type: ignore[arg-type]

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
        loss: Any = None
        aux_loss = None
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
