"""`btx_moe`: our own Hugging Face architecture, for the mixtures that no other computes (`btx_nemo/convert/hf_moe`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from btx_nemo.config.build import build
from btx_nemo.families import base as families
from btx_nemo.families.architecture import ANY_FAMILY, SHARED, register_architecture
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.decoder import KEPT, special_tokens
from btx_nemo.families.names import parse_router
from btx_nemo.families.rope import scales_rope_by_layer
from btx_nemo.families.rope_config import read_rope, write_rope
from btx_nemo.families.settings import RENAMED, refuse_quantized
from btx_nemo.families.sizes import check_sizes
from btx_nemo.plan.expr import Expr, Take

CODE = Path(__file__).resolve().parent.parent / "convert" / "hf_moe"
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "olmo3", "olmoe")
"""Families whose layers its code computes."""
ROUTERS = (
    *("top_k", "switch", "soft", "sample_top1", "noisy_top_k"),
    *("divmoe", "nexus", "flexolmo", "expert_choice"),
)
MIXTURE = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "router": "router",
    "options": "router_options",
    "shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "shared_expert_gate": "shared_expert_gate",
    "experts": "expert_names",
    "layers": "moe_layers",
    "dense_ffn_hidden_size": "dense_intermediate_size",
}
"""MoEConfig's names -> config.json's."""
APART = ("moe", "rope_theta", "rope_scaling")
"""Fields of ModelConfig that are not one value in config.json."""


@dataclass(frozen=True)
class BtxMoe:
    """See `btx_nemo.families.architecture.Architecture` and `WithCode`."""

    model_type: str = "btx_moe"
    family: str = ANY_FAMILY
    mixture: bool = True

    def read(self, config: Mapping[str, Any], where: str) -> ModelConfig:
        """config.json -> ModelConfig, as strictly as model.json."""
        refuse_quantized(config, where)
        theta, scaling = read_rope(config, where, 10000.0)
        names = {name: RENAMED.get(name, name) for name in ModelConfig.__dataclass_fields__ if name not in APART}
        values = {name: config[key] for name, key in names.items() if key in config}
        mixture = {name: config[key] for name, key in MIXTURE.items() if key in config}
        values |= {"rope_theta": theta, "rope_scaling": scaling, "moe": mixture}
        return check_sizes(build(ModelConfig, values, where=where), where)

    def write(self, model: ModelConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
        """ModelConfig -> config.json, whole, in the spellings of transformers 4.57 and 5."""
        values = asdict(model)
        mixture = values["moe"]
        return {
            "architectures": ["BtxMoeForCausalLM"],
            "model_type": self.model_type,
            "auto_map": {
                "AutoConfig": "configuration_btx_moe.BtxMoeConfig",
                "AutoModel": "modeling_btx_moe.BtxMoeModel",
                "AutoModelForCausalLM": "modeling_btx_moe.BtxMoeForCausalLM",
            },
            **{RENAMED.get(name, name): value for name, value in values.items() if name not in APART},
            **{MIXTURE[name]: value for name, value in mixture.items()},
            **write_rope(model.rope_theta, model.rope_scaling),
            "rope_scaling_full_attention_only": scales_rope_by_layer(model),
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
            "torch_dtype": dtype,
            "dtype": dtype,
            **special_tokens(model, base),
            **{key: base[key] for key in KEPT if key in base},
        }

    def inexact(self, model: ModelConfig) -> str | None:
        """Every router of ours over every family of ours; not what others have registered."""
        if model.moe is None:
            return "btx_moe is a mixture"
        if model.family not in FAMILIES:
            return f"btx_moe does not know family {model.family}"
        if model.moe.router not in ROUTERS:
            return f"btx_moe does not know moe.router={model.moe.router}"
        if scales_rope_by_layer(model) and (model.rope_scaling or {}).get("truncate") is False:
            return f"btx_moe obeys truncate=false of rope_scaling, which {model.family} does not"
        return None

    def stored(self, model: ModelConfig) -> dict[str, Expr]:
        """The shared names."""
        return {name: Take(SHARED, name) for name in families.layout(model, "float32")}

    def shared(self, model: ModelConfig, source: str) -> dict[str, Expr]:
        """The shared names."""
        return {name: Take(source, name) for name in families.layout(model, "float32")}

    def files(self) -> list[Path]:
        """The model's code, which needs torch and transformers alone."""
        return sorted(CODE.glob("*_btx_moe.py"))

    def keeps_fp32(self, name: str) -> bool:
        """The router, as in Megatron."""
        return parse_router(name) is not None


register_architecture(BtxMoe())
