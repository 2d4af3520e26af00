"""Llama 2 and 3, Mistral, SmolLM2, and their mixture, Mixtral: names and layouts as one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from btx_nemo.families import llama_config
from btx_nemo.families.base import register
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.rules import GateUp, GroupedQKV, PerExpert, Rule, Same
from btx_nemo.plan.expr import Expr, Take
from btx_nemo.plan.layout import Layout, TensorInfo

SAME = Same()


@dataclass(frozen=True)
class Row:
    """One Megatron tensor and the Hugging Face tensors that it is made of, each with its shape.

    `{i}` in a name is a layer, `{e}` an expert; a shape is a list of the sizes that `_sizes` names.
    """

    megatron: str
    hf: tuple[tuple[str, str], ...]
    rule: Rule = SAME
    when: str = "always"
    """"always", "dense", "moe" or "untied"."""


_LAYER = "decoder.layers.{i}."
_HF = "model.layers.{i}."
_MOE = _HF + "block_sparse_moe."
TABLE = (
    Row("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "V H"),)),
    Row(
        _LAYER + "self_attention.linear_qkv.layer_norm_weight",
        ((_HF + "input_layernorm.weight", "H"),),
    ),
    Row(
        _LAYER + "self_attention.linear_qkv.weight",
        (
            (_HF + "self_attn.q_proj.weight", "Q H"),
            (_HF + "self_attn.k_proj.weight", "K H"),
            (_HF + "self_attn.v_proj.weight", "K H"),
        ),
        GroupedQKV(),
    ),
    Row(_LAYER + "self_attention.linear_proj.weight", ((_HF + "self_attn.o_proj.weight", "H Q"),)),
    Row(
        _LAYER + "mlp.linear_fc1.layer_norm_weight",
        ((_HF + "post_attention_layernorm.weight", "H"),),
        when="dense",
    ),
    Row(
        _LAYER + "mlp.linear_fc1.weight",
        ((_HF + "mlp.gate_proj.weight", "F H"), (_HF + "mlp.up_proj.weight", "F H")),
        GateUp(),
        when="dense",
    ),
    Row(_LAYER + "mlp.linear_fc2.weight", ((_HF + "mlp.down_proj.weight", "H F"),), when="dense"),
    Row(_LAYER + "pre_mlp_layernorm.weight", ((_HF + "post_attention_layernorm.weight", "H"),), when="moe"),
    Row(_LAYER + "mlp.router.weight", ((_MOE + "gate.weight", "N H"),), when="moe"),
    Row(
        _LAYER + "mlp.experts.experts.linear_fc1.weight",
        ((_MOE + "experts.{e}.w1.weight", "F H"), (_MOE + "experts.{e}.w3.weight", "F H")),
        PerExpert(GateUp()),
        when="moe",
    ),
    Row(
        _LAYER + "mlp.experts.experts.linear_fc2.weight",
        ((_MOE + "experts.{e}.w2.weight", "H F"),),
        PerExpert(Same()),
        when="moe",
    ),
    Row("decoder.final_layernorm.weight", (("model.norm.weight", "H"),)),
    Row("output_layer.weight", (("lm_head.weight", "V H"),), when="untied"),
)
FFN_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Mixtral's names of an expert's matrices -> Llama's names of the same matrices."""


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "F": config.ffn_hidden_size,
        "Q": config.num_attention_heads * config.head_dim,
        "K": config.num_query_groups * config.head_dim,
        "N": config.moe.num_experts if config.moe else 0,
    }


def _rows(config: ModelConfig) -> list[tuple[str, list[tuple[str, str]], Rule]]:
    """The table for one model: (Megatron key, [(HF name, shape)], rule), outermost tensors first, layer by layer."""
    flags = {
        "always": True,
        "dense": config.moe is None,
        "moe": config.moe is not None,
        "untied": not config.tie_word_embeddings,
    }
    rows = [row for row in TABLE if flags[row.when]]
    first = next(n for n, row in enumerate(rows) if "{i}" in row.megatron)
    last = max(n for n, row in enumerate(rows) if "{i}" in row.megatron) + 1
    result = [_fill(row, config, 0) for row in rows[:first]]
    for layer in range(config.num_layers):
        result += [_fill(row, config, layer) for row in rows[first:last]]
    return result + [_fill(row, config, 0) for row in rows[last:]]


def _fill(row: Row, config: ModelConfig, layer: int) -> tuple[str, list[tuple[str, str]], Rule]:
    experts = range(config.moe.num_experts) if config.moe and isinstance(row.rule, PerExpert) else range(1)
    parts = [(name.format(i=layer, e=e), shape) for e in experts for name, shape in row.hf]
    return row.megatron.format(i=layer), parts, row.rule


class Llama:
    """The family, as the registry sees it; see `btx_nemo.families.base.Family`."""

    name = "llama"
    model_types: tuple[str, ...] = ("llama", "mistral", "mixtral")

    def read(self, config: Mapping[str, Any], where: str) -> ModelConfig:
        """config.json -> ModelConfig."""
        return llama_config.read(config, where)

    def hf_config(self, config: ModelConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
        """ModelConfig -> config.json."""
        return llama_config.write(config, dtype, base)

    def hf_layout(self, config: ModelConfig, dtype: str) -> Layout:
        """Names and shapes of the Hugging Face tensors."""
        sizes = _sizes(config)
        return {
            name: TensorInfo(tuple(sizes[letter] for letter in shape.split()), dtype)
            for _, parts, _ in _rows(config)
            for name, shape in parts
        }

    def to_megatron(self, config: ModelConfig) -> dict[str, Expr]:
        """Megatron key -> expression over source "hf"."""
        return {key: rule.join([Take("hf", name) for name, _ in parts], config) for key, parts, rule in _rows(config)}

    def to_hf(self, config: ModelConfig) -> dict[str, Expr]:
        """Hugging Face name -> expression over source "ckpt"."""
        table: dict[str, Expr] = {}
        for key, parts, rule in _rows(config):
            for (name, _), expr in zip(parts, rule.split(Take("ckpt", key), config), strict=True):
                table[name] = expr
        return table


register(Llama())
