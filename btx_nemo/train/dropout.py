"""Dropout of the Switch Transformer's fine-tuning (section 2.2): much inside experts, little elsewhere.

It goes into Megatron's layers through torch's own hooks. A mask depends on the micro-batch, the layer, the expert and a
token's place in the micro-batch alone: it is the same at every layout, in recomputation and in a resumed run.

Shape suffixes: S sequence (of this rank), B micro-batch, H hidden, T tokens, F feed-forward width, E experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from btx_nemo.config.schema import DropoutConfig, LayoutConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.model import chunks
from btx_nemo.routers.noise import generator_of, micro_batch_seed
from btx_nemo.routers.ranks import Places, gather

EMBEDDING, ATTENTION, FEED_FORWARD, EXPERT = range(101, 105)
"""What a mask is for, as a part of its seed."""


def check_dropout(config: DropoutConfig, model: ModelConfig, layout: LayoutConfig) -> None:
    """Raises UserError for a share that is none, or one of experts that are not there, or not whole."""
    for name in ("hidden", "expert"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"dropout.{name}={getattr(config, name)}: must lie between 0 and 1, without 1")
    if config.expert and model.moe is None:
        raise UserError(f"dropout.expert={config.expert}: the model is dense and has no experts; give dropout.hidden")
    if config.expert and layout.etp > 1:
        raise UserError(f"dropout.expert={config.expert}: not with experts that are cut; give layout.etp=1")


def install_dropout(gpt: Any, config: DropoutConfig) -> None:
    """Puts dropout into a model that trains; in evaluation it does nothing."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for chunk in chunks(gpt):
        for layer in chunk.decoder.layers:
            if config.hidden:
                for module, place in ((layer.self_attention, ATTENTION), (layer.mlp, FEED_FORWARD)):
                    hook = functools.partial(_drop_output, gpt.config, config.hidden, (layer.layer_number, place))
                    module.register_forward_hook(hook)
            if config.expert and isinstance(layer.mlp, MoELayer):
                ExpertDropout(layer.mlp, layer.layer_number, config.expert)
        if config.hidden and hasattr(chunk, "embedding"):
            hook = functools.partial(_drop_output, gpt.config, config.hidden, (0, EMBEDDING))
            chunk.embedding.register_forward_hook(hook)


def _drop_output(config: Any, share: float, place: tuple[int, int], module: Any, args: Any, output: Any) -> Any:
    if not module.training:
        return output
    hidden_SBH = output[0] if isinstance(output, tuple) else output
    from megatron.core import parallel_state as mpu

    # Each rank has its part of the sequence; without sequence parallelism, tensor-parallel ranks have the same.
    group = (
        mpu.get_tensor_and_context_parallel_group() if config.sequence_parallel else mpu.get_context_parallel_group()
    )
    length, generator = hidden_SBH.shape[0], generator_of(hidden_SBH.device, micro_batch_seed(), *place)
    whole_SBH = _draw(share, (group.size() * length, *hidden_SBH.shape[1:]), generator)
    kept_SBH = Places(group, config.context_parallel_size).cut(whole_SBH)
    dropped_SBH = _drop(hidden_SBH, kept_SBH, share)
    return (dropped_SBH, *output[1:]) if isinstance(output, tuple) else dropped_SBH


def _draw(share: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    kept = torch.empty(shape, dtype=torch.bool, device=generator.device)
    return kept.bernoulli_(1 - share, generator=generator)


def _drop(values: Tensor, kept: Tensor, share: float) -> Tensor:
    return values.masked_fill(~kept, 0) * (1 / (1 - share))


class ExpertDropout:
    """Dropout of the experts' activations, just before the down-projection, in one of Megatron's MoE layers.

    An expert's tokens come from all ranks of its expert-parallel group, in the order of these ranks, and from each in
    order of position. So the router tells the group how many tokens of which micro-batch it sends to each expert from
    each part of its sequences, and how many come from the parts before, of all ranks that share the micro-batch.
    """

    def __init__(self, layer: Any, number: int, share: float):
        self.router, self.group, self.number, self.share = layer.router, layer.ep_group, number, share
        self.sources: list[tuple[int, list[int], list[int]]] = []
        layer.router.register_forward_hook(self._remember)
        for expert, mlp in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True):
            mlp.linear_fc2.register_forward_pre_hook(functools.partial(self._drop, expert))

    @torch.no_grad()
    def _remember(self, router: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        if not router.training:
            return
        sent_PE = router.places.counts(output[1])
        earlier_PE = router.places.sum_of_earlier(sent_PE)
        seed_P1 = torch.full_like(sent_PE[:, :1], micro_batch_seed())
        rows = torch.cat(gather(torch.cat([seed_P1, earlier_PE, sent_PE], dim=1), self.group)).tolist()
        experts = sent_PE.shape[1]
        self.sources = [(row[0], row[1 : experts + 1], row[experts + 1 :]) for row in rows]

    def _drop(self, expert: int, module: Any, args: tuple[Tensor, ...]) -> Any:
        if not module.training:
            return args
        hidden_TF = args[0]
        parts = [
            _draw(
                self.share,
                (earlier[expert] + sent[expert], hidden_TF.shape[1]),
                generator_of(hidden_TF.device, seed, self.number, EXPERT, expert),
            )[earlier[expert] :]
            for seed, earlier, sent in self.sources
        ]
        kept_TF = torch.cat(parts)
        if kept_TF.shape != hidden_TF.shape:
            raise RuntimeError(f"expert {expert} got {hidden_TF.shape[0]} tokens, its router sent {kept_TF.shape[0]}")
        return (_drop(hidden_TF, kept_TF, self.share), *args[1:])
