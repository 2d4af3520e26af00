"""Llama 2 and 3, Mistral, SmolLM2, and their mixture, Mixtral."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from btx_nemo.families import base, llama_config
from btx_nemo.families.architecture import SHARED, is_renormalised_top_k, register_architecture
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import (
    ATTENTION_OUT,
    EMBEDDING,
    EXPERTS,
    FINAL_NORM,
    INPUT_NORM,
    MLP,
    MLP_NORMS,
    OUTPUT,
    QKV,
)
from btx_nemo.plan.expr import Expr, Take

TABLE = (EMBEDDING, INPUT_NORM, QKV, ATTENTION_OUT, *MLP_NORMS, *MLP, *EXPERTS, FINAL_NORM, OUTPUT)
_MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_EXPERT = re.compile(r"(model\.layers\.\d+\.)mlp\.(experts\.\d+\.)(gate|up|down)_proj(\.weight)")
_GATE = re.compile(r"(model\.layers\.\d+\.)mlp\.(gate\.weight)")


def mixtral_name(name: str) -> str:
    """A shared name as Mixtral's files have it."""
    name = _EXPERT.sub(lambda m: f"{m[1]}block_sparse_moe.{m[2]}{_MIXTRAL_PARTS[m[3]]}{m[4]}", name)
    return _GATE.sub(r"\1block_sparse_moe.\2", name)


@dataclass(frozen=True)
class LlamaLike:
    """One architecture of the family; see `btx_nemo.families.architecture.Architecture`."""

    model_type: str
    family: str = "llama"

    def read(self, config: Mapping[str, Any], where: str) -> ModelConfig:
        """config.json -> ModelConfig."""
        return llama_config.read(config, where)

    def write(self, model: ModelConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
        """ModelConfig -> config.json."""
        return llama_config.write(self.model_type, model, dtype, base)

    def inexact(self, model: ModelConfig) -> str | None:
        """Llama and Mistral are dense; Mixtral renormalises the gates of its top k, in every layer."""
        if (model.moe is not None) != (self.model_type == "mixtral"):
            return f"{self.model_type} is {'a mixture' if model.moe is None else 'dense'}"
        if model.moe is None:
            return None
        if not is_renormalised_top_k(model.moe):
            return f"mixtral cannot compute moe.router={model.moe.router} with {model.moe.options}"
        if model.moe.layers is not None or model.moe.shared_expert_intermediate_size:
            return "mixtral has experts in every layer, and none that is shared"
        return None

    def stored(self, model: ModelConfig) -> dict[str, Expr]:
        """Mixtral has its own names, the others the shared ones."""
        return {self._name(name): Take(SHARED, name) for name in base.layout(model, "float32")}

    def shared(self, model: ModelConfig, source: str) -> dict[str, Expr]:
        """The inverse of `stored`."""
        return {name: Take(source, self._name(name)) for name in base.layout(model, "float32")}

    def _name(self, name: str) -> str:
        return mixtral_name(name) if self.model_type == "mixtral" else name


base.register_family(base.Family("llama", TABLE))
for _model_type in ("llama", "mistral", "mixtral"):
    register_architecture(LlamaLike(_model_type))
