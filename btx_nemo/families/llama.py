"""Llama 2 and 3, Mistral, SmolLM 2, and their mixture, Mixtral."""

from __future__ import annotations

import re

from btx_nemo.families.architecture import register_architecture
from btx_nemo.families.base import Family, register_family
from btx_nemo.families.decoder import DecoderArchitecture, Defaults
from btx_nemo.families.mixture_form import MixtureForm
from btx_nemo.families.table import PRE_NORM
from btx_nemo.families.windows import EveryLayer

_MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_EXPERT = re.compile(r"(model\.layers\.\d+\.)mlp\.(experts\.\d+\.)(gate|up|down)_proj(\.weight)")
_GATE = re.compile(r"(model\.layers\.\d+\.)mlp\.(gate\.weight)")


def mixtral_name(name: str) -> str:
    """A shared name as Mixtral's files have it."""
    name = _EXPERT.sub(lambda m: f"{m[1]}block_sparse_moe.{m[2]}{_MIXTRAL_PARTS[m[3]]}{m[4]}", name)
    return _GATE.sub(r"\1block_sparse_moe.\2", name)


register_family(Family("llama", PRE_NORM))
register_architecture(
    DecoderArchitecture(
        model_type="llama",
        family="llama",
        class_name="LlamaForCausalLM",
        defaults=Defaults(max_position_embeddings=2048, tokens=(1, 2, None)),
        bias="all",
        bias_setting="attention_bias",
        fixed={"mlp_bias": False},
    )
)
register_architecture(
    DecoderArchitecture(
        model_type="mistral",
        family="llama",
        class_name="MistralForCausalLM",
        defaults=Defaults(max_position_embeddings=131072, kv_heads=8, tokens=(1, 2, None)),
        windows=EveryLayer(4096),
    )
)
register_architecture(
    DecoderArchitecture(
        model_type="mixtral",
        family="llama",
        class_name="MixtralForCausalLM",
        defaults=Defaults(
            max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6, kv_heads=8, tokens=(1, 2, None)
        ),
        windows=EveryLayer(),
        form=MixtureForm(num_experts=8, top_k=2, renormalises=True),
        fixed={"router_jitter_noise": 0.0},
        on_disk=mixtral_name,
    )
)
