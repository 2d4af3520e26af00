"""ModelConfig -> Megatron's TransformerConfig -> GPTModel, one pipeline stage of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from btx_nemo.config.schema import LayoutConfig, RouterConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.rope import attention_factor, inverse_frequencies
from btx_nemo.families.table import dense_width, padded_vocabulary
from btx_nemo.megatron.compat import mark_experts, mark_tensor_parallel
from btx_nemo.megatron.precision import DTYPES
from btx_nemo.megatron.specs import block_spec
from btx_nemo.routers import router_class

RECOMPUTATION: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": dict(recompute_granularity="selective"),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}
"""Megatron's settings for each value of `recompute`."""


def transformer_config(
    model: ModelConfig,
    layout: LayoutConfig,
    *,
    precision: str = "fp32",
    recompute: str = "none",
    recompute_modules: Sequence[str] = ("core_attn",),
    per_token_loss: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Megatron's TransformerConfig. Weights come from a plan (`load.py`), so it initialises none.

    `settings` are further keywords for it, or other values for those of a mixture: `transformer_settings`.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=dense_width(model),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.attention_bias != "none",
        qk_layernorm=model.qk_norm != "none",
        # YaRN scales q and k, both by its factor; rope turns all of a head, so the scores are scaled by its square.
        softmax_scale=attention_factor(model) ** 2 / math.sqrt(model.head_dim),
        attention_dropout=0.0,
        hidden_dropout=0.0,  # train/dropout.py has its own, which no layout changes
        calculate_per_token_loss=per_token_loss,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        **_interleaved_settings(layout),
        context_parallel_size=layout.cp,
        # Transformer Engine passes keys round in a ring, but not with a window.
        cp_comm_type="p2p" if model.sliding_window is None else "all_gather",
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
        pipeline_dtype=DTYPES[precision],
        params_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        perform_initialization=False,
        use_cpu_initialization=True,
        # Fusions that need Apex or CUDA kernels; Megatron's plain torch forms are exact everywhere.
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **{**_mixture_settings(model), **(settings or {})},
        **_window_settings(model),
        **RECOMPUTATION[recompute],
        recompute_modules=list(recompute_modules),
    )


def _interleaved_settings(layout: LayoutConfig) -> dict[str, Any]:
    if layout.vpp == 1:
        return {}
    # In one batch, what two stages send each other would be mixed up: with each, the next is also the one before.
    return dict(virtual_pipeline_model_parallel_size=layout.vpp, overlap_p2p_comm=True, batch_p2p_comm=False)


def _mixture_settings(model: ModelConfig) -> dict[str, Any]:
    if model.moe is None:
        return {}
    return dict(
        num_moe_experts=model.moe.num_experts,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",  # the balance loss is our router's
        moe_token_dispatcher_type="alltoall",
        moe_ffn_hidden_size=model.ffn_hidden_size,
        moe_grouped_gemm=False,
        moe_layer_freq=[int(model.is_mixture(layer)) for layer in range(model.num_layers)],
        moe_shared_expert_intermediate_size=model.moe.shared_expert_intermediate_size or None,
        moe_shared_expert_gate=model.moe.shared_expert_gate,
        **router_class(model.moe.router).megatron_settings(model),
    )


def _window_settings(model: ModelConfig) -> dict[str, Any]:
    if model.sliding_window is None:
        return {}
    return dict(
        window_size=(model.sliding_window - 1, 0),  # Megatron counts the positions before a token's own
        window_attn_skip_freq=[int(model.is_sliding(layer)) for layer in range(model.num_layers)],
    )


class Chunks(torch.nn.ModuleList):
    """The virtual pipeline stages of a rank, in their order, as one module: each a GPTModel."""

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig, which all share."""
        return self[0].config

    def sharded_state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """As a GPTModel's: the names are those of `state_dict`, and each tensor's key is global."""
        return {
            f"{number}.{name}": value
            for number, chunk in enumerate(self)
            for name, value in chunk.sharded_state_dict(**kwargs).items()  # type: ignore[operator]
        }


def chunks(gpt: torch.nn.Module) -> list[Any]:
    """The GPTModels that `build_model` returned: one, or one for each virtual pipeline stage."""
    return list(gpt) if isinstance(gpt, Chunks) else [gpt]


def chunk_layers(model: ModelConfig, layout: LayoutConfig, pp_rank: int, chunk: int) -> range:
    """Layers, by their number in the model from zero, of a virtual pipeline stage of a pipeline rank."""
    size = model.num_layers // (layout.pp * layout.vpp)
    first = (chunk * layout.pp + pp_rank) * size
    return range(first, first + size)


def build_model(
    model: ModelConfig,
    layout: LayoutConfig,
    *,
    precision: str = "fp32",
    router: RouterConfig | None = None,
    recompute: str = "none",
    recompute_modules: Sequence[str] = ("core_attn",),
    per_token_loss: bool = False,
    settings: Mapping[str, Any] | None = None,
    transformer_engine: bool | None = None,
    documents: bool = False,
) -> torch.nn.Module:
    """This rank's GPTModel, or its `Chunks` with layout.vpp > 1, weights undefined: `load_weights` fills them.

    Needs `parallel_state` entered. `settings` are `transformer_config`'s; `transformer_engine` and `documents` are
    `block_spec`'s.
    """
    from megatron.core import parallel_state as mpu

    config = transformer_config(
        model,
        layout,
        precision=precision,
        recompute=recompute,
        recompute_modules=recompute_modules,
        per_token_loss=per_token_loss,
        settings=settings,
    )
    parts = []
    for number in range(layout.vpp):
        spec = block_spec(
            model,
            router or RouterConfig(),
            chunk_layers(model, layout, mpu.get_pipeline_model_parallel_rank(), number),
            transformer_engine=transformer_engine,
            context_parallel=layout.cp > 1,
            grouped=config.moe_grouped_gemm,
            documents=documents,
        )
        parts.append(_gpt_model(model, config, spec, number if layout.vpp > 1 else None))
    return Chunks(parts) if layout.vpp > 1 else parts[0]


def _gpt_model(model: ModelConfig, config: Any, spec: Any, vp_stage: int | None) -> Any:
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_model import GPTModel

    from btx_nemo.megatron.platform import device

    gpt = GPTModel(
        config,
        spec,
        vocab_size=padded_vocabulary(model.vocab_size),
        max_sequence_length=model.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    ).to(device())
    if gpt.post_process and gpt.vocab_size != model.vocab_size:
        gpt.output_layer.register_forward_hook(functools.partial(_never_predict, model.vocab_size))
    mark_tensor_parallel(gpt)
    mark_experts(gpt)
    # Megatron knows one fixed set of Llama 3's scaling numbers; the frequencies themselves leave nothing to guess.
    gpt.rotary_pos_emb.inv_freq = inverse_frequencies(model).to(device())
    return gpt


def _never_predict(vocab_size: int, layer: Any, _: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Hook of the output layer: the rows that pad the vocabulary get no probability, and so no gradient either.

    logits [S, B, this rank's rows, or all where it gathers them].
    """
    from megatron.core import parallel_state as mpu

    logits, bias = output
    rows = layer.output_size_per_partition
    first = 0 if logits.shape[-1] != rows else mpu.get_tensor_model_parallel_rank() * rows
    padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab_size
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min), bias
