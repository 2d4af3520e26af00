"""Architectures of Hugging Face that are Llama with differences, each told by its differences alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from btx_nemo.errors import UserError
from btx_nemo.families import base as families
from btx_nemo.families import names
from btx_nemo.families.architecture import SHARED, architectures
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.mixture_form import MixtureForm
from btx_nemo.families.rope import scales_rope_by_layer
from btx_nemo.families.rope_config import read_rope, read_rope_by_layer, write_rope
from btx_nemo.families.settings import flag, natural, number, refuse_quantized
from btx_nemo.families.sizes import check_sizes
from btx_nemo.families.table import shared_width
from btx_nemo.families.windows import NoWindow, Windows
from btx_nemo.plan.expr import Expr, Slice, Take

ACTIVATIONS = ("silu", "swish")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
KEPT = ("attention_dropout", "use_cache")
"""Settings that say nothing of the architecture: passed on from the base config.json."""
REFUSED = ("mlp_bias", "use_bias", "clip_qkv", "final_logit_softcapping", "logit_scale")
"""Settings of other architectures and of variants, none of which is held."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What transformers assumes where config.json is silent."""

    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    kv_heads: int | None = None
    """None: as many as there are query heads."""
    head_dim: int | None = None
    """None: hidden_size / heads."""
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)
    """Ids of the first, last and padding tokens."""


@dataclass(frozen=True, kw_only=True)
class DecoderArchitecture:
    """One architecture; see `btx_nemo.families.architecture.Architecture`."""

    model_type: str
    family: str
    class_name: str
    """The model's class in transformers."""
    defaults: Defaults
    bias: str = "none"
    """What `attention_bias` of ModelConfig is, or can be where `bias_setting` is given."""
    bias_setting: str | None = None
    """The setting that turns the biases on; None where they are always as `bias` says."""
    bias_default: bool = False
    qk_norm: str = "none"
    post_norm: bool = False
    windows: Windows = field(default_factory=NoWindow)
    rope_by_layer: bool = False
    """Whether rope is scaled in layers with full attention only, as OLMo 3 does."""
    free_head_dim: bool = True
    """Whether heads may be of another size than hidden_size / heads."""
    form: MixtureForm | None = None
    """How it is a mixture; None for a dense architecture."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its own that are the same in every model."""
    on_disk: Callable[[str], str] = lambda name: name
    """Shared name -> name on disk."""

    @property
    def mixture(self) -> bool:
        """Whether its models are mixtures."""
        return self.form is not None

    # config.json

    def read(self, config: Mapping[str, Any], where: str) -> ModelConfig:
        """config.json -> ModelConfig. Raises UserError naming the setting that is missing or cannot be held."""
        self._refuse(config, where)
        heads, hidden = natural(config, "num_attention_heads", where), natural(config, "hidden_size", where)
        if config.get("head_dim") is None and self.defaults.head_dim is None and hidden % heads:
            raise UserError(f"{where}: num_attention_heads={heads} does not divide hidden_size={hidden}; give head_dim")
        layers = natural(config, "num_hidden_layers", where)
        window, types = self.windows.read(config, where, min(layers, 4096))
        if self.rope_by_layer:
            rope = read_rope_by_layer(config, where, self.defaults.rope_theta, sliding=window is not None)
        else:
            rope = read_rope(config, where, self.defaults.rope_theta)
        moe = self.form.read(config, where, layers) if self.form else None
        width = "moe_intermediate_size" if self.form and self.form.dense_layers else "intermediate_size"
        model = ModelConfig(
            family=self.family,
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=natural(config, width, where),
            num_attention_heads=heads,
            num_query_groups=natural(config, "num_key_value_heads", where, self.defaults.kv_heads or heads),
            head_dim=natural(config, "head_dim", where, self.defaults.head_dim or hidden // heads),
            vocab_size=natural(config, "vocab_size", where),
            max_position_embeddings=natural(
                config, "max_position_embeddings", where, self.defaults.max_position_embeddings
            ),
            norm_eps=number(config, "rms_norm_eps", where, self.defaults.rms_norm_eps),
            rope_theta=rope[0],
            rope_scaling=rope[1],
            attention_bias=self._read_bias(config, where),
            qk_norm=self.qk_norm,
            post_norm=self.post_norm,
            sliding_window=window,
            layer_types=types,
            tie_word_embeddings=flag(config, "tie_word_embeddings", where),
            init_std=number(config, "initializer_range", where, 0.02),
            moe=moe,
        )
        check_sizes(model, where)
        if not self.free_head_dim and model.head_dim * heads != hidden:
            raise UserError(f"{where}: head_dim={model.head_dim} is not hidden_size / num_attention_heads")
        return model

    def _refuse(self, config: Mapping[str, Any], where: str) -> None:
        refuse_quantized(config, where)
        settings = [*REFUSED, *(key for key in ("attention_bias", "qkv_bias") if key != self.bias_setting)]
        for key in settings:
            # Qwen 2 says of its biases what is always so.
            if config.get(key) and not (self.bias == "qkv" and key in ("attention_bias", "qkv_bias")):
                raise UserError(f"{where}: {key}={config[key]!r} is not supported by {self.model_type} here; remove it")
        activation = config.get("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise UserError(f"{where}: hidden_act={activation!r} is not supported; only {' or '.join(ACTIVATIONS)}")
        if config.get("partial_rotary_factor", 1) not in (None, 1, 1.0):
            raise UserError(
                f"{where}: partial_rotary_factor={config['partial_rotary_factor']} is not supported; only 1"
            )

    def _read_bias(self, config: Mapping[str, Any], where: str) -> str:
        if self.bias_setting is None:
            return self.bias
        return self.bias if flag(config, self.bias_setting, where, self.bias_default) else "none"

    def write(self, model: ModelConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
        """ModelConfig -> config.json, in both spellings: that of transformers 4.57 and that of 5."""
        result = {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_position_embeddings,
            "initializer_range": model.init_std,
            "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.tie_word_embeddings,
            **write_rope(model.rope_theta, model.rope_scaling, by_layer=self.rope_by_layer),
            "torch_dtype": dtype,
            "dtype": dtype,
            **special_tokens(model, base),
            **{key: base[key] for key in KEPT if key in base},
            **self.windows.write(model),
        }
        result |= self.fixed
        if self.bias_setting:
            result[self.bias_setting] = model.attention_bias != "none"
        if self.form:
            result |= self.form.write(model, base)
        return result

    # What it computes.

    def inexact(self, model: ModelConfig) -> str | None:
        """Why it would not compute what the model does; None when it is exact."""
        reason = self._lacks(model)
        if reason is None and self.form and model.moe:
            reason = self.form.cannot_route(model.moe)
            return reason and f"{self.model_type} cannot compute {reason}"
        return reason and f"{self.model_type} has no place for {reason}"

    def _lacks(self, model: ModelConfig) -> str | None:
        if model.moe is None and self.form:
            return "a dense model"
        if model.moe is not None and not self.form:
            return "experts"
        biases = (self.bias, "none") if self.bias_setting else (self.bias,)
        if model.attention_bias not in biases:
            return f"attention_bias={model.attention_bias}"
        if model.qk_norm != self.qk_norm:
            return f"qk_norm={model.qk_norm}"
        if model.post_norm != self.post_norm:
            return f"{'post' if model.post_norm else 'pre'}-norm"
        if not self.windows.holds(model):
            return f"sliding_window={model.sliding_window} in the model's layers"
        if not self.free_head_dim and model.head_dim * model.num_attention_heads != model.hidden_size:
            return f"head_dim={model.head_dim}"
        if model.rope_scaling and model.sliding_window and self.rope_by_layer != scales_rope_by_layer(model):
            return "this rope scaling beside a sliding window"
        return self.form.lacks(model) if self.form else None

    # Tensors.

    def stored(self, model: ModelConfig) -> dict[str, Expr]:
        """Name on disk -> expression over the shared names. Raises UserError when a tensor would have no place."""
        reason = self._lacks(model)
        if reason:
            raise UserError(f"{self.model_type} has no place for {reason}; choose another target")
        layout = families.layout(model, "float32")
        result: dict[str, Expr] = {self.on_disk(name): Take(SHARED, name) for name in layout}
        if self.form and self.form.shared_expert is not None and not shared_width(model):
            result |= _no_shared_expert(model)
        return result

    def shared(self, model: ModelConfig, source: str) -> dict[str, Expr]:
        """Shared name -> expression over the names on disk."""
        return {name: Take(source, self.on_disk(name)) for name in families.layout(model, "float32")}


def _no_shared_expert(model: ModelConfig) -> dict[str, Expr]:
    """What transformers wants to see of a shared expert of width zero, which adds nothing.

    Its gate's value does not matter: a row of the router has the shape and the dtype.
    """
    result: dict[str, Expr] = {}
    for layer in filter(model.is_mixture, range(model.num_layers)):
        for part in names.PARTS:
            matrix = Take(SHARED, names.expert(layer, 0, part))
            result[names.shared_expert(layer, part)] = Slice(matrix, 1 if part == "down" else 0, 0, 0)
        result[names.shared_expert_gate(layer)] = Slice(Take(SHARED, names.router(layer)), 0, 0, 1)
    return result


def special_tokens(model: ModelConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of special tokens, every one stated: where `base` is silent, those of *its* architecture are meant."""
    architecture = architectures().get(base.get("model_type", ""))
    silent = architecture.defaults.tokens if isinstance(architecture, DecoderArchitecture) else (None, None, None)
    # transformers builds no model whose default padding token lies beyond its vocabulary.
    inside = [None if number is None or number >= model.vocab_size else number for number in silent]
    return {key: base.get(key, number) for key, number in zip(TOKENS, inside, strict=True)}
