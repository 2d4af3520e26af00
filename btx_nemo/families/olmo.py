"""OLMo 2 and 3 (norms after the blocks, q and k normalised over all heads), FlexOlmo, and OLMoE (norms first)."""

from __future__ import annotations

from btx_nemo.families.architecture import register_architecture
from btx_nemo.families.base import Family, register_family
from btx_nemo.families.decoder import DecoderArchitecture, Defaults
from btx_nemo.families.mixture_form import MixtureForm
from btx_nemo.families.table import POST_NORM, PRE_NORM
from btx_nemo.families.windows import LayerTypes

register_family(Family("olmo2", POST_NORM))
register_family(Family("olmo3", POST_NORM))
register_family(Family("olmoe", PRE_NORM))
register_architecture(
    DecoderArchitecture(
        model_type="olmo2",
        family="olmo2",
        class_name="Olmo2ForCausalLM",
        defaults=Defaults(max_position_embeddings=2048, rms_norm_eps=1e-5, tokens=(None, 50279, 1)),
        bias="all",
        bias_setting="attention_bias",
        qk_norm="full",
        post_norm=True,
    )
)
register_architecture(
    DecoderArchitecture(
        model_type="olmo3",
        family="olmo3",
        class_name="Olmo3ForCausalLM",
        defaults=Defaults(
            max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=500000.0, tokens=(None, 50279, 1)
        ),
        bias="all",
        bias_setting="attention_bias",
        qk_norm="full",
        post_norm=True,
        windows=LayerTypes(),
        rope_by_layer=True,
    )
)
register_architecture(
    DecoderArchitecture(
        model_type="flex_olmo",
        family="olmo2",
        class_name="FlexOlmoForCausalLM",
        defaults=Defaults(max_position_embeddings=4096, rope_theta=500000.0, tokens=(None, 100257, 100277)),
        bias="all",
        bias_setting="attention_bias",
        qk_norm="full",
        post_norm=True,
        form=MixtureForm(num_experts=7, top_k=5),
    )
)
register_architecture(
    DecoderArchitecture(
        model_type="olmoe",
        family="olmoe",
        class_name="OlmoeForCausalLM",
        defaults=Defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, tokens=(None, 50279, 1)),
        bias="all",
        bias_setting="attention_bias",
        qk_norm="full",
        free_head_dim=False,
        form=MixtureForm(num_experts=64, top_k=8),
    )
)
