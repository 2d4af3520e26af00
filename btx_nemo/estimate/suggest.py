"""Layouts that fit: all that divide the model and the ranks, in the order of an estimated step time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.errors import UserError
from btx_nemo.estimate.communication import Communication, communication
from btx_nemo.estimate.memory import Memory, Setup, worst
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import dense_width, shared_width

NODE = 8
"""GPUs that share fast links."""
FAST, SLOW = 300e9, 40e9
"""Bytes per second of one GPU within a node and between nodes, as seen by large transfers."""
FLOPS = 400e12
"""Of one GPU, as seen by large matrix products in bf16."""
HEADROOM = 0.9
"""Share of the memory to fill: kernels, communication buffers and fragmentation take the rest."""

LEAST_POSITIONS = 4096
"""Of a sequence on a context-parallel rank; with fewer, what it sends takes longer than what it computes."""
MOST_CHUNKS = 4
"""Virtual stages of a pipeline rank; more send more and save hardly any waiting."""


@dataclass(frozen=True)
class Candidate:
    """One layout, and what it costs."""

    setup: Setup
    memory: Memory
    communication: Communication
    seconds: float
    """A step by the numbers above: an order to try things in, not a forecast."""


def candidates(
    model: ModelConfig, ranks: int, *, global_batch_size: int, seq_length: int, **rest: object
) -> Iterator[Setup]:
    """Every layout that divides the model, the ranks and the batch, within what is sensible.

    Tensor parallelism stays within a node, a context-parallel rank keeps at least LEAST_POSITIONS of a sequence,
    experts are whole or cut as the rest is, and a pipeline rank has at most MOST_CHUNKS virtual stages.
    """
    for layout in _layouts(model, ranks, seq_length):
        dp = layout.dp(ranks)
        microbatches = global_batch_size // dp
        if global_batch_size % dp or (layout.vpp > 1 and microbatches % layout.pp):
            continue
        yield Setup(
            layout=layout,
            ranks=ranks,
            seq_length=seq_length,
            micro_batch_size=1,
            microbatches=microbatches,
            **rest,  # type: ignore[arg-type]
        )


def _layouts(model: ModelConfig, ranks: int, seq_length: int) -> Iterator[LayoutConfig]:
    widths = (model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size, model.vocab_size, seq_length)
    experts = model.moe.num_experts if model.moe else 1
    for tp, pp in itertools.product(_divisors(min(NODE, ranks)), _divisors(model.num_layers)):
        if ranks % (tp * pp) or any(size % tp for size in widths):
            continue
        contexts = [cp for cp in _divisors(ranks // (tp * pp)) if cp == 1 or _may_cut(seq_length, cp, tp)]
        chunks = [n for n in _divisors(model.num_layers // pp) if n == 1 or (pp > 1 and n <= MOST_CHUNKS)]
        cuts = sorted({1, tp}) if model.moe else [1]
        for cp, vpp, ep, etp in itertools.product(contexts, chunks, _divisors(experts), cuts):
            if (ranks // pp) % (ep * etp) == 0:
                yield LayoutConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp)


def _may_cut(seq_length: int, cp: int, tp: int) -> bool:
    return seq_length % (2 * cp * tp) == 0 and seq_length // cp >= LEAST_POSITIONS


def suggest(model: ModelConfig, setups: Iterator[Setup], memory_bytes: int, count: int = 5) -> list[Candidate]:
    """The `count` fastest of those that fit into `memory_bytes` a rank. Raises UserError when none does."""
    found, smallest = [], None
    for setup in setups:
        for recompute in ("none", "full"):
            tried = dataclasses.replace(setup, recompute=recompute)
            needs = worst(model, tried)
            smallest = needs.total if smallest is None else min(smallest, needs.total)
            if needs.total <= HEADROOM * memory_bytes:
                sent = communication(model, tried)
                found.append(Candidate(tried, needs, sent, step_seconds(model, tried, sent)))
                break
    if smallest is None:
        raise UserError("no layout divides the model, the ranks and the batch; change gpus or global_batch_size")
    if not found:
        raise UserError(
            f"no layout fits: the smallest needs {smallest / HEADROOM / 2**30:.0f} GiB a GPU, "
            f"{memory_bytes / 2**30:.0f} are there; give more gpus"
        )
    return sorted(found, key=lambda candidate: candidate.seconds)[:count]


def step_seconds(model: ModelConfig, setup: Setup, sent: Communication) -> float:
    """Compute with the pipeline's bubble, and what is sent, nothing overlapped."""
    layout = setup.layout
    bubble = 1 + (layout.pp - 1) / (setup.microbatches * layout.vpp)
    passes = 4 if setup.recompute == "full" else 3
    compute = passes / 3 * flops(model, setup.seq_length) * setup.tokens * setup.microbatches
    compute *= bubble / (layout.tp * layout.pp * FLOPS)
    ep_speed = FAST if max(layout.tp, layout.etp) * layout.ep <= NODE else SLOW
    cp_speed = FAST if layout.tp * layout.cp <= NODE else SLOW
    dp_speed = FAST if setup.ranks <= NODE else SLOW
    inside = sent.tensor / FAST + sent.expert / ep_speed + sent.context / cp_speed
    return compute + inside + sent.pipeline / SLOW + sent.data / dp_speed


def flops(model: ModelConfig, seq_length: int) -> float:
    """Of a token, forwards and backwards: six per weight that it meets, and attention over half the sequence."""
    per_token = model.vocab_size * model.hidden_size
    query, key = model.num_attention_heads * model.head_dim, model.num_query_groups * model.head_dim
    for layer in range(model.num_layers):
        per_token += model.hidden_size * (2 * query + 2 * key)
        width = model.ffn_hidden_size
        if model.is_mixture(layer) and model.moe:
            width = width * model.moe.top_k + shared_width(model)
        else:
            width = dense_width(model)
        per_token += 3 * model.hidden_size * width
    return 6 * per_token + 6 * model.num_layers * query * seq_length


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
