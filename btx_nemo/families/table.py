"""Family tables: each row says which tensors, by their shared names, make one Megatron tensor, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from btx_nemo.families.config import ModelConfig
from btx_nemo.families.router_state import router_state
from btx_nemo.families.rules import GateUp, GroupedQKV, PerExpert, Rule, Same
from btx_nemo.plan.expr import Expr, Take
from btx_nemo.plan.layout import Layout, TensorInfo

SAME = Same()


def shared_width(config: ModelConfig) -> int:
    """Width of the shared expert; 0 for none."""
    return (config.moe.shared_expert_intermediate_size or 0) if config.moe else 0


def dense_width(config: ModelConfig) -> int:
    """Width of a dense layer's feed-forward block."""
    return (config.moe and config.moe.dense_ffn_hidden_size) or config.ffn_hidden_size


@dataclass(frozen=True)
class Row:
    """One Megatron tensor and the tensors that it is made of, each with its shape.

    `{i}` in a name is a layer, `{e}` an expert; a shape is a list of the sizes that `SIZES` names.
    """

    megatron: str
    parts: tuple[tuple[str, str], ...]
    rule: Rule = SAME
    when: Callable[[ModelConfig, int], bool] = lambda config, layer: True
    """Whether a model has it in a layer (0 for tensors outside of the layers)."""


SIZES: dict[str, Callable[[ModelConfig], int]] = {
    "V": lambda config: config.vocab_size,
    "H": lambda config: config.hidden_size,
    "F": lambda config: config.ffn_hidden_size,
    "D": dense_width,
    "S": shared_width,
    "Q": lambda config: config.num_attention_heads * config.head_dim,
    "K": lambda config: config.num_query_groups * config.head_dim,
}
"""Letters of the shapes: vocabulary, hidden, expert's, dense and shared widths, query and key rows."""


def _dense(config: ModelConfig, layer: int) -> bool:
    return not config.is_mixture(layer)


def _mixture(config: ModelConfig, layer: int) -> bool:
    return config.is_mixture(layer)


def _shared(config: ModelConfig, layer: int) -> bool:
    return config.is_mixture(layer) and shared_width(config) > 0


_M = "decoder.layers.{i}."
_H = "model.layers.{i}."
EMBEDDING = Row("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "V H"),))
INPUT_NORM = Row(_M + "self_attention.linear_qkv.layer_norm_weight", ((_H + "input_layernorm.weight", "H"),))
QKV = Row(
    _M + "self_attention.linear_qkv.weight",
    (
        (_H + "self_attn.q_proj.weight", "Q H"),
        (_H + "self_attn.k_proj.weight", "K H"),
        (_H + "self_attn.v_proj.weight", "K H"),
    ),
    GroupedQKV(),
)
ATTENTION_OUT = Row(_M + "self_attention.linear_proj.weight", ((_H + "self_attn.o_proj.weight", "H Q"),))
MLP_NORMS = (
    Row(_M + "mlp.linear_fc1.layer_norm_weight", ((_H + "post_attention_layernorm.weight", "H"),), when=_dense),
    Row(_M + "pre_mlp_layernorm.weight", ((_H + "post_attention_layernorm.weight", "H"),), when=_mixture),
)
MLP = (
    Row(
        _M + "mlp.linear_fc1.weight",
        ((_H + "mlp.gate_proj.weight", "D H"), (_H + "mlp.up_proj.weight", "D H")),
        GateUp(dense_width),
        _dense,
    ),
    Row(_M + "mlp.linear_fc2.weight", ((_H + "mlp.down_proj.weight", "H D"),), when=_dense),
)
EXPERTS = (
    Row(
        _M + "mlp.experts.experts.linear_fc1.weight",
        ((_H + "mlp.experts.{e}.gate_proj.weight", "F H"), (_H + "mlp.experts.{e}.up_proj.weight", "F H")),
        PerExpert(GateUp()),
        _mixture,
    ),
    Row(
        _M + "mlp.experts.experts.linear_fc2.weight",
        ((_H + "mlp.experts.{e}.down_proj.weight", "H F"),),
        PerExpert(SAME),
        _mixture,
    ),
    Row(
        _M + "mlp.shared_experts.linear_fc1.weight",
        ((_H + "mlp.shared_expert.gate_proj.weight", "S H"), (_H + "mlp.shared_expert.up_proj.weight", "S H")),
        GateUp(shared_width),
        _shared,
    ),
    Row(
        _M + "mlp.shared_experts.linear_fc2.weight", ((_H + "mlp.shared_expert.down_proj.weight", "H S"),), when=_shared
    ),
)
"""A mixture's feed-forward part, but for its router, whose tensors `router_state` names."""
FINAL_NORM = Row("decoder.final_layernorm.weight", (("model.norm.weight", "H"),))
OUTPUT = Row(
    "output_layer.weight", (("lm_head.weight", "V H"),), when=lambda config, layer: not config.tie_word_embeddings
)

Filled = tuple[str, list[tuple[str, tuple[int, ...]]], Rule]
"""(Megatron key, [(name, shape)], rule)."""


def fill(table: tuple[Row, ...], config: ModelConfig) -> list[Filled]:
    """The rows of one model: outermost tensors first, then layer by layer, in the table's order."""
    inside = [n for n, row in enumerate(table) if "{i}" in row.megatron]
    first, last = inside[0], inside[-1] + 1
    filled = [_fill(row, config, 0) for row in table[:first] if row.when(config, 0)]
    for layer in range(config.num_layers):
        filled += [_fill(row, config, layer) for row in table[first:last] if row.when(config, layer)]
        if config.is_mixture(layer):
            filled += [
                (f"decoder.layers.{layer}.mlp.router.{name}", [(f"model.layers.{layer}.mlp.gate.{name}", shape)], SAME)
                for name, shape in router_state(config).items()
            ]
    return filled + [_fill(row, config, 0) for row in table[last:] if row.when(config, 0)]


def _fill(row: Row, config: ModelConfig, layer: int) -> Filled:
    experts = range(config.moe.num_experts) if config.moe and isinstance(row.rule, PerExpert) else range(1)
    parts = [
        (name.format(i=layer, e=e), tuple(SIZES[letter](config) for letter in shape.split()))
        for e in experts
        for name, shape in row.parts
    ]
    return row.megatron.format(i=layer), parts, row.rule


def layout(table: tuple[Row, ...], config: ModelConfig, dtype: str) -> Layout:
    """Shared name -> shape, in the order in which a model is written."""
    return {name: TensorInfo(shape, dtype) for _, parts, _ in fill(table, config) for name, shape in parts}


def to_megatron(table: tuple[Row, ...], config: ModelConfig, source: str) -> dict[str, Expr]:
    """Megatron key -> expression over the shared names of `source`."""
    return {
        key: rule.join([Take(source, name) for name, _ in parts], config) for key, parts, rule in fill(table, config)
    }


def from_megatron(table: tuple[Row, ...], config: ModelConfig, source: str) -> dict[str, Expr]:
    """Shared name -> expression over the Megatron keys of `source`."""
    result: dict[str, Expr] = {}
    for key, parts, rule in fill(table, config):
        for (name, _), expr in zip(parts, rule.split(Take(source, key), config), strict=True):
            result[name] = expr
    return result
