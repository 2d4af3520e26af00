"""Layer specs: Megatron's own, with our router in them, and the same checkpoint keys from every backend."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from btx_nemo.config.schema import RouterConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.compat import has_transformer_engine, supported, with_router
from btx_nemo.routers import router_class


class RMSNorm(torch.nn.RMSNorm):
    """For the local backend: Megatron's WrappedTorchNorm refuses sequence parallelism, which needs only this mark."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=torch.float32)
        self.epsilon = eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises in fp32 and scales in the input's dtype, as the Hugging Face models do."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * x32.to(x.dtype)


def block_spec(
    model: ModelConfig, router: RouterConfig, layers: range, *, transformer_engine: bool | None = None
) -> Any:
    """TransformerBlockSubmodules for the layers of this pipeline stage, by their number in the model.

    `transformer_engine` chooses its layers or Megatron's own; None takes them where they are.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if transformer_engine is None:
        transformer_engine = has_transformer_engine()
    kinds = {mixture: _layer(model, router, mixture, transformer_engine) for mixture in map(model.is_mixture, layers)}
    specs = [kinds[model.is_mixture(layer)] for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_final_norm(transformer_engine))


def _layer(model: ModelConfig, router: RouterConfig, mixture: bool, transformer_engine: bool) -> Any:
    experts = model.moe.num_experts if mixture and model.moe else None
    layer = _transformer_engine_layer(experts) if transformer_engine else _local_layer(experts)
    if experts is None:
        return layer
    assert model.moe is not None
    build_router = functools.partial(router_class(model.moe.router), model=model, options=router)
    mlp = with_router(layer.submodules.mlp, build_router)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mlp=mlp))


def _final_norm(transformer_engine: bool) -> Any:
    if not transformer_engine:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


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


def _transformer_engine_layer(experts: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec as get_spec

    return get_spec(**supported(get_spec, num_experts=experts, moe_grouped_gemm=False))
