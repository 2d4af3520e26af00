"""Layer specs: Megatron's own, with our router and the family's differences in them, and the same checkpoint keys from
every backend."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from btx_nemo.config.schema import RouterConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.rope import plain_frequencies, scales_rope
from btx_nemo.megatron.attention import gathered_keys_attention, local_attention, plain_rope_attention, with_bias
from btx_nemo.megatron.compat import has_transformer_engine, with_linear_fc1, with_router
from btx_nemo.megatron.norms import KeyNorm, PostNormAdd, QueryNorm, RMSNorm
from btx_nemo.routers import router_class


def block_spec(
    model: ModelConfig,
    router: RouterConfig,
    layers: range,
    *,
    transformer_engine: bool | None = None,
    context_parallel: bool = False,
    grouped: bool = False,
    documents: bool = False,
) -> Any:
    """TransformerBlockSubmodules for the layers of this pipeline stage, by their number in the model.

    `transformer_engine` chooses its layers or Megatron's own; None takes them where they are. `grouped` computes a
    layer's experts by one matrix product, which only Transformer Engine's layers do. With `documents`, sequences may
    hold several, see `documents.py`.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if transformer_engine is None:
        transformer_engine = has_transformer_engine()
    kinds: dict[tuple[bool, bool], Any] = {}
    specs = []
    for layer in layers:
        kind = model.is_mixture(layer), scales_rope(model, layer)
        if kind not in kinds:
            kinds[kind] = _layer(model, router, *kind, transformer_engine, grouped)
            if documents or (context_parallel and not transformer_engine):
                kinds[kind] = _with_core_attention(kinds[kind], gathered_keys_attention())
            elif not transformer_engine:
                kinds[kind] = _with_core_attention(kinds[kind], local_attention())
        specs.append(kinds[kind])
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_norm(transformer_engine))


def _layer(
    model: ModelConfig, router: RouterConfig, mixture: bool, scaled_rope: bool, transformer_engine: bool, grouped: bool
) -> Any:
    """Megatron's layer, changed where the family differs from Llama."""
    experts = model.moe.num_experts if mixture and model.moe else None
    layer = _transformer_engine_layer(experts, grouped) if transformer_engine else _local_layer(experts)
    submodules = layer.submodules
    changes: dict[str, Any] = {"self_attention": _attention(model, submodules.self_attention, scaled_rope)}
    keys = dict(submodules.sharded_state_dict_keys_map)
    if model.post_norm:
        changes |= _norms_after(model, submodules, experts, transformer_engine)
        changes["self_attention"] = _without_norm(changes["self_attention"], transformer_engine)
        keys = {"self_attn_bda.": "post_self_attn_layernorm.", "mlp_bda.": "post_mlp_layernorm."}
    if model.moe is not None and experts is not None:
        build_router = functools.partial(router_class(model.moe.router), model=model, options=router)
        changes["mlp"] = with_router(submodules.mlp, build_router)
    submodules = dataclasses.replace(submodules, **changes, sharded_state_dict_keys_map=keys)
    return dataclasses.replace(layer, submodules=submodules)


def _attention(model: ModelConfig, attention: Any, scaled_rope: bool) -> Any:
    """The self-attention's spec with norms of q and k, a bias on its output, and rope of its own."""
    submodules = attention.submodules
    if model.qk_norm == "head":
        submodules = dataclasses.replace(submodules, q_layernorm=RMSNorm, k_layernorm=RMSNorm)
    elif model.qk_norm == "full":
        submodules = dataclasses.replace(submodules, q_layernorm=QueryNorm, k_layernorm=KeyNorm)
    if model.attention_bias == "all":
        submodules = dataclasses.replace(submodules, linear_proj=with_bias(submodules.linear_proj))
    attention = dataclasses.replace(attention, submodules=submodules)
    if model.rope_scaling is not None and not scaled_rope:
        params = {**attention.params, "frequencies": plain_frequencies(model)}
        attention = dataclasses.replace(attention, module=plain_rope_attention(), params=params)
    return attention


def _with_core_attention(layer: Any, core_attention: Any) -> Any:
    """A layer with another core attention."""
    attention = layer.submodules.self_attention
    submodules = dataclasses.replace(attention.submodules, core_attention=core_attention)
    attention = dataclasses.replace(attention, submodules=submodules)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention))


def _norms_after(model: ModelConfig, submodules: Any, experts: int | None, transformer_engine: bool) -> dict[str, Any]:
    """Changes to a layer that move its norms from before attention and the feed-forward block to after them."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    add = ModuleSpec(module=PostNormAdd, params={"hidden_size": model.hidden_size, "eps": model.norm_eps})
    changes: dict[str, Any] = dict(
        input_layernorm=IdentityOp, pre_mlp_layernorm=IdentityOp, self_attn_bda=add, mlp_bda=add
    )
    if transformer_engine and experts is None:  # its feed-forward block has the norm inside
        changes["mlp"] = with_linear_fc1(submodules.mlp, _te("TEColumnParallelLinear"))
    return changes


def _without_norm(attention: Any, transformer_engine: bool) -> Any:
    """The self-attention's spec without the norm that Transformer Engine has inside its first linear layer."""
    if not transformer_engine:
        return attention
    submodules = dataclasses.replace(attention.submodules, linear_qkv=_te("TEColumnParallelLinear"))
    return dataclasses.replace(attention, submodules=submodules)


def _te(name: str) -> Any:
    from megatron.core.extensions import transformer_engine

    return getattr(transformer_engine, name)


def _norm(transformer_engine: bool) -> Any:
    return _te("TENorm") if transformer_engine else RMSNorm


def _local_layer(experts: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm")
    # The norms are named as the Transformer Engine layers name them, which fuse them into the next linear layer
    # (but for the one before a mixture); so a checkpoint does not depend on the backend that wrote it.
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if experts is None:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    submodules = dataclasses.replace(
        layer.submodules, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, sharded_state_dict_keys_map=keys
    )
    return dataclasses.replace(layer, submodules=submodules)


def _transformer_engine_layer(experts: int | None, grouped: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=grouped)
