"""Bytes that one rank holds while it trains: weights, gradients, optimizer, activations.

Parameters are counted over the family's table, cut as Megatron cuts them. Activations are what autograd keeps, counted
tensor by tensor from Megatron's own layers (tests/estimate holds them against autograd's own count). T tokens of a
micro-batch, H hidden, F feed-forward, Q query width, S sequence, k experts per token.
"""

from __future__ import annotations

import functools
import re
from dataclasses import astuple, dataclass
from math import prod

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.families.base import get_family
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import dense_width, fill, shared_width
from btx_nemo.megatron.model import chunk_layers
from btx_nemo.routers import router_class

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
    recompute_modules: tuple[str, ...] = ("core_attn",)
    ema: bool = False
    """Whether an average of the weights is kept."""
    offload: float = 0.0
    """Fraction of the optimizer, and of the average, that is in the host's memory."""
    documents: bool = False
    """Whether a sequence may hold several, each for itself: attention is then Megatron's local one, with a mask."""

    @property
    def dp(self) -> int:
        """Ranks that have their own sequences."""
        return self.layout.dp(self.ranks)

    @property
    def dense_dp(self) -> int:
        """Ranks that share the dense weights."""
        return self.ranks // (self.layout.tp * self.layout.pp)

    @property
    def expert_dp(self) -> int:
        """Ranks that share an expert's weights."""
        return self.ranks // (self.layout.pp * self.layout.ep * self.layout.etp)

    @property
    def positions(self) -> int:
        """Of each sequence, on a context-parallel rank."""
        return self.seq_length // self.layout.cp

    @property
    def tokens(self) -> int:
        """T: tokens of a micro-batch, on a context-parallel rank."""
        return self.positions * self.micro_batch_size

    def again(self, module: str) -> bool:
        """Whether a module's activations are computed again by itself."""
        return self.recompute == "selective" and module in self.recompute_modules


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
    host: int
    """In the host's memory all the time, for the optimizer that `offload` put there."""
    saving: int
    """Besides, and in the memory of the host: what a checkpoint takes at its peak, after the step."""

    @property
    def total(self) -> int:
        """All bytes of a step, on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass
class Counts:
    """Parameters of a part of the model, by how ranks share them."""

    cut: int = 0
    """Cut by tensor parallelism."""
    whole: int = 0
    """Whole on every rank."""
    router: int = 0
    """Whole, and fp32 whatever the model is."""
    expert: int = 0
    """Spread and cut by expert parallelism."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))

    def on_rank(self, layout: LayoutConfig) -> Counts:
        """What one rank has of them."""
        return Counts(self.cut // layout.tp, self.whole, self.router, self.expert // (layout.ep * layout.etp))


@dataclass
class Parts:
    """Parameters of the whole model, by where a pipeline puts them."""

    layers: list[Counts]
    embedding: Counts
    """On the first stage; with tied weights on the last as well."""
    end: Counts
    """On the last stage."""


_known: dict[str, Parts] = {}
"""By the model: a suggestion asks for the same some thousand times."""


def parts(model: ModelConfig) -> Parts:
    """Counted over the family's table."""
    if repr(model) not in _known:
        found = Parts([Counts() for _ in range(model.num_layers)], Counts(), Counts())
        for key, shapes, _ in fill(get_family(model.family).table, model):
            layer = _LAYER.match(key)
            where = found.embedding if key.startswith("embedding.") else found.end
            where = found.layers[int(layer[1])] if layer else where
            kind = "router" if ".router." in key else "cut" if key.endswith(_CUT) else "whole"
            kind = "expert" if ".experts." in key else kind
            setattr(where, kind, getattr(where, kind) + sum(prod(shape) for _, shape in shapes))
        _known[repr(model)] = found
    return _known[repr(model)]


def on_rank(model: ModelConfig, layout: LayoutConfig, stage: int) -> Counts:
    """The parameters of a rank of a pipeline stage."""
    found, total, last = parts(model), Counts(), layout.pp - 1
    for chunk in range(layout.vpp):
        total = sum((found.layers[layer] for layer in chunk_layers(model, layout, stage, chunk)), total)
    if stage == 0 or (model.tie_word_embeddings and stage == last):
        total += found.embedding
    return (total + found.end if stage == last else total).on_rank(layout)


def memory(model: ModelConfig, setup: Setup, stage: int) -> Memory:
    """What a rank of a pipeline stage holds at the peak of a step."""
    size, found = ITEMSIZE[setup.precision], on_rank(model, setup.layout, stage)
    count = sum(astuple(found))
    weights = size * count + (FP32 - size) * found.router
    # AdamW's two moments, the average, and the main weights of what is narrower.
    kept, main = (2 + setup.ema) * FP32, FP32 if size < FP32 else 0
    dense = (kept + main) * (found.cut + found.whole) + kept * found.router
    optimizer = dense // setup.dense_dp + (kept + main) * found.expert // setup.expert_dp
    # What is offloaded has its weights and gradients there, too, whatever their dtype.
    own = (count - found.expert) // setup.dense_dp + found.expert // setup.expert_dp
    host = int(setup.offload * (kept + 2 * FP32) * own)
    optimizer = int((1 - setup.offload) * optimizer)
    gradients = FP32 * count  # reduced in fp32
    saving = _saving(count - found.expert, found.expert, setup)
    return Memory(stage, count, weights, gradients, optimizer, activations(model, setup, stage), host, saving)


def _saving(dense: int, expert: int, setup: Setup) -> int:
    """Moments and main weights, whole on every rank that has the weights (Megatron's `fully_reshardable`): first of the
    dense weights, then of the experts. While they are gathered, one after the other, there are besides: a rank's own
    part of all three, and three times one of them, for what came and what was joined are held until the next are.
    The averages follow, one by one.
    """
    three = 3 * FP32
    first = 2 * three * dense + three * dense // setup.dense_dp
    second = three * dense + 2 * three * expert + three * expert // setup.expert_dp
    return max(first, second if expert else 0, (three + FP32) * (dense + expert) if setup.ema else 0)


def experts_per_token(model: ModelConfig, layer: int) -> float:
    """Experts that a token is sent to on average, by the router's rule; 0 in a dense layer."""
    if not model.is_mixture(layer) or model.moe is None:
        return 0
    return _router_class(model.moe.router).mean_experts_per_token(model.moe, layer)


_router_class = functools.cache(router_class)
"""Suggestions ask thousands of times."""


def worst(model: ModelConfig, setup: Setup) -> Memory:
    """The stage that needs most."""
    return max((memory(model, setup, stage) for stage in range(setup.layout.pp)), key=lambda found: found.total)


def activations(model: ModelConfig, setup: Setup, stage: int) -> int:
    """What autograd keeps at the peak of a pipeline rank, while the passes of the schedule's warm-up are open."""
    layout = setup.layout
    layers = [
        [_layer(model, setup, i) for i in chunk_layers(model, layout, stage, chunk)] for chunk in range(layout.vpp)
    ]
    last = head(model, setup) if stage == layout.pp - 1 else 0
    if setup.recompute == "full":  # every layer's input, and one layer's all while it is computed again, after the head
        one = ITEMSIZE[setup.precision] * setup.tokens * model.hidden_size // layout.tp
        kept = [one * len(chunk) for chunk in layers]
        once = max(*(layer.kept for chunk in layers for layer in chunk), last)
    else:
        kept = [sum(layer.kept for layer in chunk) for chunk in layers]
        once = max(max(layer.again for chunk in layers for layer in chunk), last)
    flying = _in_flight(setup, stage)
    mask = setup.micro_batch_size * setup.positions * setup.seq_length if setup.documents else 0
    if setup.recompute == "full" or setup.again("core_attn"):  # Megatron keeps the mask among what it computes from
        mask *= flying
    # Micro-batches go through a rank's chunks in groups of pp: each passes the first, then each the second.
    return sum(kept[number // layout.pp % layout.vpp] for number in range(flying)) + once + mask


def _in_flight(setup: Setup, stage: int) -> int:
    """Forward passes of a chunk whose backward pass is to come, at most (Megatron's 1F1B, interleaved or not)."""
    layout = setup.layout
    after = layout.pp - stage - 1
    warm_up = after if layout.vpp == 1 else 2 * after + (layout.vpp - 1) * layout.pp
    return min(warm_up + 1, setup.microbatches * layout.vpp)


def head(model: ModelConfig, setup: Setup) -> int:
    """The final norm and the loss, which makes its softmax in fp32 beside the logits; the gradient takes its place."""
    hidden = 2 * setup.tokens * model.hidden_size * ITEMSIZE[setup.precision]
    return (hidden + 2 * FP32 * setup.tokens * model.vocab_size) // setup.layout.tp


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer and one micro-batch."""

    kept: int
    """From the forward pass to the backward pass."""
    again: int
    """Besides, while the backward pass computes them again."""


def _layer(model: ModelConfig, setup: Setup, layer: int) -> _Layer:
    size, tokens, tp = ITEMSIZE[setup.precision], setup.tokens, setup.layout.tp
    hidden, query = model.hidden_size, model.num_attention_heads * model.head_dim
    # Inputs and outputs of the two norms, and the attention's output.
    kept, again = 5 * tokens * hidden * size // tp, 0
    kept += tokens * query * size // tp  # rotated queries
    kept += tokens * _before_norms(model, size) // tp
    kept += 4 * setup.positions * model.head_dim * size  # sines and cosines, for queries and keys
    for module, parts in (("core_attn", _attention(model, setup)), ("mlp", _feed_forward(model, setup, layer))):
        module = "moe" if module == "mlp" and model.is_mixture(layer) else module
        kept, again = (kept, max(again, parts)) if setup.again(module) else (kept + parts, again)
    return _Layer(kept, again)


def _before_norms(model: ModelConfig, size: int) -> int:
    """Queries and keys as they came, of a token, where they are normalised, and the norms' fp32 scales."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    query, key = heads * model.head_dim * size, groups * model.head_dim * size
    if model.qk_norm == "full":
        return query + key + 2 * FP32
    if model.qk_norm == "head":  # the keys still lie among all that the projection made
        return query + (query + 2 * key) + (heads + groups) * FP32
    return 0


def _attention(model: ModelConfig, setup: Setup) -> int:
    """Keys and values, one per query head, and the scores."""
    size, tp = ITEMSIZE[setup.precision], setup.layout.tp
    query = model.num_attention_heads * model.head_dim
    if setup.flash and not setup.documents:
        return 2 * setup.tokens * query * size // tp
    total = 2 * setup.seq_length * setup.micro_batch_size * query * size // tp  # of the whole sequence
    scores = model.num_attention_heads * setup.micro_batch_size * setup.positions * setup.seq_length // tp
    return total + scores * (size + (FP32 if size < FP32 else 0))


def _feed_forward(model: ModelConfig, setup: Setup, layer: int) -> int:
    size, tokens, tp = ITEMSIZE[setup.precision], setup.tokens, setup.layout.tp
    if not model.is_mixture(layer):
        return 5 * tokens * dense_width(model) * size // tp  # both halves, silu, and the product's factors
    routed = int(experts_per_token(model, layer) * tokens) // tp  # balanced
    total = routed * (6 * model.ffn_hidden_size + setup.layout.etp * model.hidden_size) * size
    total += tokens * model.hidden_size * FP32 // tp  # what the router sees
    return total + 5 * tokens * shared_width(model) * size // tp
