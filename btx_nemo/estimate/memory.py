"""Bytes that one rank holds while it trains: weights, gradients, optimizer, activations.

Parameters are counted over the family's table, cut as Megatron cuts them. Activations are what autograd keeps, counted
tensor by tensor from Megatron's own layers (tests/estimate holds them against autograd's own count). T tokens of a
micro-batch, H hidden, F feed-forward, Q query width, S sequence, k experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.families.base import get_family
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import dense_width, fill, shared_width

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_CUT = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_proj.weight",
    ".mlp.linear_fc1.weight",
    ".mlp.linear_fc2.weight",
    "shared_experts.linear_fc1.weight",
    "shared_experts.linear_fc2.weight",
)
"""Ends of the Megatron keys that tensor parallelism cuts; all others are whole on every rank."""
FP32 = 4
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Setup:
    """What a step looks like, beside the model."""

    layout: LayoutConfig
    ranks: int
    seq_length: int
    micro_batch_size: int
    microbatches: int
    precision: str = "bf16"
    recompute: str = "none"
    flash: bool = True
    """Attention that keeps no probabilities (Transformer Engine on a GPU); Megatron's local layers keep them."""

    @property
    def dp(self) -> int:
        """Ranks that share the dense weights."""
        return self.ranks // (self.layout.tp * self.layout.pp)

    @property
    def expert_dp(self) -> int:
        """Ranks that share an expert's weights."""
        return self.ranks // (self.layout.pp * self.layout.ep)

    @property
    def tokens(self) -> int:
        """T: tokens of a micro-batch."""
        return self.seq_length * self.micro_batch_size


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    stage: int
    parameters: int
    """Not bytes: how many of them this rank holds."""
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Piece:
    """A rank's part of one parameter."""

    key: str
    numel: int
    expert: bool


def pieces(model: ModelConfig, layout: LayoutConfig, stage: int) -> Iterator[Piece]:
    """The parameters of a rank of a pipeline stage."""
    per_stage = model.num_layers // layout.pp
    last = layout.pp - 1
    for key, parts, _ in fill(get_family(model.family).table, model):
        numel = sum(prod(shape) for _, shape in parts)
        layer = _LAYER.match(key)
        if layer:
            mine = int(layer[1]) // per_stage == stage
        elif key.startswith("embedding."):
            mine = stage == 0 or (model.tie_word_embeddings and stage == last)
        else:
            mine = stage == last
        if mine:
            expert = ".experts." in key
            shared = layout.ep if expert else layout.tp if key.endswith(_CUT) else 1
            yield Piece(key, numel // shared, expert)


def memory(model: ModelConfig, setup: Setup, stage: int) -> Memory:
    """What a rank of a pipeline stage holds at the peak of a step."""
    size = ITEMSIZE[setup.precision]
    count = weights = gradients = optimizer = 0
    for piece in pieces(model, setup.layout, stage):
        item = FP32 if ".router." in piece.key else size
        count += piece.numel
        weights += item * piece.numel
        gradients += FP32 * piece.numel  # reduced in fp32
        moments = 2 * FP32 + (FP32 if item < FP32 else 0)  # AdamW's two, and the main weights of a narrower model
        optimizer += moments * piece.numel // (setup.expert_dp if piece.expert else setup.dp)
    return Memory(stage, count, weights, gradients, optimizer, activations(model, setup, stage))


def worst(model: ModelConfig, setup: Setup) -> Memory:
    """The stage that needs most."""
    return max((memory(model, setup, stage) for stage in range(setup.layout.pp)), key=lambda found: found.total)


def activations(model: ModelConfig, setup: Setup, stage: int) -> int:
    """What autograd keeps at the peak: 1F1B holds pp - stage micro-batches of a stage at once, if there are so many."""
    per_stage = model.num_layers // setup.layout.pp
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    kept = [_layer(model, setup, model.is_mixture(layer)) for layer in layers]
    in_flight = min(setup.layout.pp - stage, setup.microbatches)
    last = head(model, setup) if stage == setup.layout.pp - 1 else 0
    if setup.recompute == "full":  # every layer's input, and one layer's all while it is computed again, after the head
        inputs = per_stage * ITEMSIZE[setup.precision] * setup.tokens * model.hidden_size // setup.layout.tp
        return inputs * in_flight + max(*kept, last)
    return sum(kept) * in_flight + last


def head(model: ModelConfig, setup: Setup) -> int:
    """The final norm and the loss, which makes its softmax in fp32 beside the logits; the gradient takes its place."""
    hidden = 3 * setup.tokens * model.hidden_size * max(ITEMSIZE[setup.precision], FP32)
    return (hidden + 2 * FP32 * setup.tokens * model.vocab_size) // setup.layout.tp


def _layer(model: ModelConfig, setup: Setup, mixture: bool) -> int:
    """One layer, one micro-batch."""
    size, tokens, tp = ITEMSIZE[setup.precision], setup.tokens, setup.layout.tp
    hidden, query = model.hidden_size, model.num_attention_heads * model.head_dim
    wide = size < FP32
    # Inputs and outputs of the norms, which compute in fp32, the attention's output and the sublayers' inputs.
    total = tokens * hidden * ((5 * size + 2 * FP32) if wide else 7 * size) // tp
    total += 3 * tokens * query * size // tp  # rotated queries, and keys and values, one per query head
    total += 4 * setup.seq_length * model.head_dim * size  # sines and cosines, for queries and keys
    if not setup.flash:
        total += setup.seq_length**2  # the causal mask
        scores = model.num_attention_heads * setup.micro_batch_size * setup.seq_length**2 // tp
        total += scores * (size + (FP32 if wide else 0))
    if not mixture:
        return total + 5 * tokens * dense_width(model) * size // tp  # both halves, silu, and the product's factors
    assert model.moe is not None
    routed = model.moe.top_k * tokens // tp  # balanced
    total += routed * (6 * model.ffn_hidden_size + hidden) * size
    total += tokens * hidden * FP32 // tp  # what the router sees
    return total + 5 * tokens * shared_width(model) * size // tp
