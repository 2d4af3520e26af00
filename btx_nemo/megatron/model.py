"""ModelConfig -> Megatron's TransformerConfig -> GPTModel, one pipeline stage of it."""

from __future__ import annotations

from typing import Any

import torch

from btx_nemo.config.schema import LayoutConfig, RouterConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.rope import inverse_frequencies
from btx_nemo.families.table import dense_width
from btx_nemo.megatron.compat import mark_experts, mark_tensor_parallel
from btx_nemo.megatron.specs import block_spec
from btx_nemo.routers import router_class

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(
    model: ModelConfig,
    layout: LayoutConfig,
    *,
    precision: str = "fp32",
    recompute: str = "none",
    per_token_loss: bool = False,
) -> Any:
    """Megatron's TransformerConfig. Weights come from a plan (`load.py`), so it initialises none."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    mixture: dict[str, Any] = {}
    if model.moe is not None:
        mixture = dict(
            num_moe_experts=model.moe.num_experts,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",  # the balance loss is our router's
            moe_token_dispatcher_type="alltoall",
            moe_ffn_hidden_size=model.ffn_hidden_size,
            moe_grouped_gemm=False,
            moe_layer_freq=[int(model.is_mixture(layer)) for layer in range(model.num_layers)],
            moe_shared_expert_intermediate_size=model.moe.shared_expert_intermediate_size or None,
            moe_shared_expert_gate=False,
            **router_class(model.moe.router).megatron_settings(model),
        )
    if recompute == "full":
        mixture |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
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
        attention_dropout=0.0,
        hidden_dropout=0.0,  # train/dropout.py has its own, which no layout changes
        calculate_per_token_loss=per_token_loss,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.tp > 1,
        pipeline_dtype=DTYPES[precision],
        params_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        perform_initialization=False,
        use_cpu_initialization=True,
        # Fusions that need Apex or CUDA kernels; Megatron's plain torch forms are exact everywhere.
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **mixture,
    )


def build_model(
    model: ModelConfig,
    layout: LayoutConfig,
    *,
    precision: str = "fp32",
    router: RouterConfig | None = None,
    recompute: str = "none",
    per_token_loss: bool = False,
    transformer_engine: bool | None = None,
) -> torch.nn.Module:
    """This rank's GPTModel, weights undefined: `load_weights` fills them. Needs `parallel_state` entered.

    `transformer_engine` is `block_spec`'s.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_model import GPTModel

    from btx_nemo.megatron.platform import device

    config = transformer_config(model, layout, precision=precision, recompute=recompute, per_token_loss=per_token_loss)
    per_stage = model.num_layers // layout.pp
    first = mpu.get_pipeline_model_parallel_rank() * per_stage
    gpt = GPTModel(
        config,
        block_spec(
            model, router or RouterConfig(), range(first, first + per_stage), transformer_engine=transformer_engine
        ),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
    ).to(device())
    mark_tensor_parallel(gpt)
    mark_experts(gpt)
    # Megatron knows one fixed set of Llama 3's scaling numbers; the frequencies themselves leave nothing to guess.
    gpt.rotary_pos_emb.inv_freq = inverse_frequencies(model).to(device())
    return gpt
