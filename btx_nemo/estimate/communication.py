"""Bytes that one rank sends in a step, by the group that it sends them in, for ring collectives."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from btx_nemo.estimate.memory import FP32, ITEMSIZE, Setup, experts_per_token, on_rank
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import shared_width
from btx_nemo.megatron.model import chunk_layers


@dataclass(frozen=True)
class Communication:
    """Bytes sent by one rank of the first stage, per optimizer step."""

    tensor: int
    """Sequence-parallel gathers and scatters around the cut layers."""
    expert: int
    """Tokens to their experts and back; where experts are cut, to all ranks that have a part."""
    context: int
    """Keys and values to the other context-parallel ranks, and their gradients back."""
    pipeline: int
    """Activations to the next stage, gradients to the one before."""
    data: int
    """Gradients reduced and weights gathered by the distributed optimizer."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.tensor + self.expert + self.context + self.pipeline + self.data


def communication(model: ModelConfig, setup: Setup) -> Communication:
    """What a rank sends; balanced routing."""
    layout, size = setup.layout, ITEMSIZE[setup.precision]
    layers = [layer for chunk in range(layout.vpp) for layer in chunk_layers(model, layout, 0, chunk)]
    activation = setup.tokens * model.hidden_size * size
    mixtures = sum(model.is_mixture(layer) for layer in layers)
    # Around each cut block: gather and scatter forwards, the same backwards, and the input gathered once more for the
    # weights' gradient. A mixture's experts are not cut, unless one is shared.
    blocks = 2 * len(layers) - (0 if shared_width(model) else mixtures)
    tensor = blocks * 5 * activation * (layout.tp - 1) // layout.tp * setup.microbatches
    away = (layout.ep - 1) / layout.ep + layout.etp - 1
    copies = sum(experts_per_token(model, layer) for layer in layers)
    expert = int(4 * copies * activation / layout.tp * away) * setup.microbatches
    # Forwards once, backwards again, and their gradients.
    keys = 2 * setup.tokens * model.num_query_groups * model.head_dim * size // layout.tp
    context = len(layers) * 3 * keys * (layout.cp - 1) * setup.microbatches
    pipeline = (2 * layout.vpp if layout.pp > 1 else 0) * activation // layout.tp * setup.microbatches
    found = on_rank(model, layout, 0)
    shared = ((sum(astuple(found)) - found.expert, setup.dense_dp), (found.expert, setup.expert_dp))
    data = sum(count * (FP32 + size) * (ranks - 1) // ranks for count, ranks in shared)
    return Communication(tensor, expert, context, pipeline, data)
