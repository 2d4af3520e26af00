"""Layouts that fit: all that divide the model and the ranks, in the order of an estimated step time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.data.sampler import num_microbatches
from btx_nemo.errors import UserError
from btx_nemo.estimate.communication import Communication, communication
from btx_nemo.estimate.memory import Memory, Setup, experts_per_token, worst
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import dense_width, shared_width
from btx_nemo.megatron.parallel import check_batch, check_layout

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
    model: ModelConfig,
    ranks: int,
    *,
    global_batch_size: int,
    seq_length: int,
    micro_batch_size: int = 1,
    given: Mapping[str, int] | None = None,
    **rest: Any,
) -> Iterator[Setup]:
    """Every layout that a run may have (`setup_of`), within what is sensible.

    Tensor parallelism stays within a node, a context-parallel rank keeps at least LEAST_POSITIONS of a sequence,
    experts are whole or cut as the rest is, and a pipeline rank has at most MOST_CHUNKS virtual stages. Axes that are
    `given` have that size alone.
    """
    for layout in _layouts(model, ranks, seq_length, given or {}):
        try:
            yield setup_of(
                model,
                layout,
                ranks,
                global_batch_size=global_batch_size,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                **rest,
            )
        except UserError:
            continue


def setup_of(
    model: ModelConfig,
    layout: LayoutConfig,
    ranks: int,
    *,
    global_batch_size: int,
    seq_length: int,
    micro_batch_size: int,
    **rest: Any,
) -> Setup:
    """A step in a layout; `rest` are further fields of `Setup`. Raises UserError for one that a run may not have."""
    check_layout(layout, ranks, model)
    microbatches = num_microbatches(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp_size=layout.dp(ranks)
    )
    check_batch(layout, seq_length=seq_length, microbatches=microbatches)
    return Setup(layout, ranks, seq_length, micro_batch_size, microbatches, **rest)


def _layouts(model: ModelConfig, ranks: int, seq_length: int, given: Mapping[str, int]) -> Iterator[LayoutConfig]:
    def sizes(axis: str, sensible: Iterable[int]) -> Iterable[int]:
        return [given[axis]] if axis in given else sensible

    contexts = [cp for cp in _divisors(ranks) if cp == 1 or seq_length // cp >= LEAST_POSITIONS]
    experts = _divisors(model.moe.num_experts) if model.moe else [1]
    for tp, pp, cp, vpp, ep in itertools.product(
        sizes("tp", _divisors(min(NODE, ranks))),
        sizes("pp", _divisors(model.num_layers)),
        sizes("cp", contexts),
        sizes("vpp", range(1, MOST_CHUNKS + 1)),
        sizes("ep", experts),
    ):
        for etp in sizes("etp", sorted({1, tp}) if model.moe else [1]):
            yield LayoutConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp)


def suggest(
    model: ModelConfig,
    setups: Iterator[Setup],
    memory_bytes: int,
    count: int = 5,
    recomputes: Sequence[str] = ("none", "full"),
) -> list[Candidate]:
    """The `count` fastest of those that fit into `memory_bytes` a rank, each with the first of `recomputes` with which
    it does. Raises UserError when none fits.
    """
    found, smallest = [], None
    for setup in setups:
        for recompute in recomputes:
            tried = dataclasses.replace(setup, recompute=recompute)
            needs = worst(model, tried)
            smallest = needs.total if smallest is None else min(smallest, needs.total)
            if needs.total <= HEADROOM * memory_bytes:
                sent = communication(model, tried)
                found.append(Candidate(tried, needs, sent, step_seconds(model, tried, sent)))
                break
    if smallest is None:
        raise UserError(
            "no layout divides the model, the ranks and the batch; change --gpus, the batch sizes or the axes"
        )
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
    per_token = float(model.vocab_size * model.hidden_size)
    query, key = model.num_attention_heads * model.head_dim, model.num_query_groups * model.head_dim
    for layer in range(model.num_layers):
        per_token += model.hidden_size * (2 * query + 2 * key)
        routed = model.ffn_hidden_size * experts_per_token(model, layer)
        width = routed + shared_width(model) if model.is_mixture(layer) else dense_width(model)
        per_token += 3 * model.hidden_size * width
    return 6 * per_token + 6 * model.num_layers * query * seq_length


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
