"""Qwen 2 and 2.5 (biases on q, k, v), Qwen 3 (q and k normalised per head), and their mixtures."""

from __future__ import annotations

from btx_nemo.families.architecture import register_architecture
from btx_nemo.families.base import Family, register_family
from btx_nemo.families.decoder import DecoderArchitecture, Defaults
from btx_nemo.families.mixture_form import MixtureForm
from btx_nemo.families.table import PRE_NORM
from btx_nemo.families.windows import EveryLayer, SwitchedLayerTypes

register_family(Family("qwen2", PRE_NORM))
register_family(Family("qwen3", PRE_NORM))
register_architecture(
    DecoderArchitecture(
        model_type="qwen2",
        family="qwen2",
        class_name="Qwen2ForCausalLM",
        defaults=Defaults(max_position_embeddings=32768, kv_heads=32),
        bias="qkv",
        windows=SwitchedLayerTypes(),
    )
)
register_architecture(
    DecoderArchitecture(
        model_type="qwen3",
        family="qwen3",
        class_name="Qwen3ForCausalLM",
        defaults=Defaults(max_position_embeddings=32768, kv_heads=32, head_dim=128),
        bias="all",
        bias_setting="attention_bias",
        qk_norm="head",
        windows=SwitchedLayerTypes(),
    )
)
register_architecture(
    DecoderArchitecture(
        model_type="qwen2_moe",
        family="qwen2",
        class_name="Qwen2MoeForCausalLM",
        defaults=Defaults(max_position_embeddings=32768, kv_heads=16),
        bias="qkv",
        bias_setting="qkv_bias",
        bias_default=True,
        windows=SwitchedLayerTypes(first_full=None),
        form=MixtureForm(num_experts=60, top_k=4, dense_layers=True, shared_expert=5632),
    )
)
register_architecture(
    DecoderArchitecture(
        model_type="qwen3_moe",
        family="qwen3",
        class_name="Qwen3MoeForCausalLM",
        defaults=Defaults(max_position_embeddings=32768, kv_heads=4),
        bias="all",
        bias_setting="attention_bias",
        qk_norm="head",
        windows=EveryLayer(4096, switch=True),
        form=MixtureForm(num_experts=128, top_k=8, dense_layers=True),
    )
)
