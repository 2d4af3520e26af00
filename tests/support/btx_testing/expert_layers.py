"""Megatron's three layers of experts, saved and loaded by their own sharded_state_dict, on gloo ranks at EP 2.

None of them computes: GroupedMLP's kernels and Transformer Engine need a GPU. What lies on disk is Megatron's doing all
the same, but for TEGroupedMLP's two linear layers, for which `_GroupedLinear` stands in.
"""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

EXPERTS, HIDDEN, WIDTH = 4, 8, 6
LAYERS = ("sequential", "grouped", "te")
PREFIX = "decoder.layers.0.mlp.experts."
State = dict[str, Tensor]
"""linear_fc1 [n, 2F, H] and linear_fc2 [n, H, F] of a rank's n experts."""


class _GroupedLinear(torch.nn.Module):
    """The parameters of Transformer Engine's GroupedLinear, sharded as Megatron's wrapper of it says."""

    def __init__(self, count: int, shape: tuple[int, int], axis: int) -> None:
        super().__init__()
        self.count, self.axis = count, axis
        for number in range(count):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(shape)))

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple, metadata: dict) -> dict[str, Any]:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        result = {}
        first = parallel_state.get_expert_model_parallel_rank() * self.count
        total = parallel_state.get_expert_model_parallel_world_size() * self.count
        for number in range(self.count):
            name, apart = f"{number}.weight", metadata.get("singleton_local_shards")
            offsets = () if apart else ((len(sharded_offsets), first + number, total),)
            weight = {name: getattr(self, f"weight{number}")}
            shards = make_sharded_tensors_for_checkpoint(weight, "", {name: self.axis}, (*sharded_offsets, *offsets))
            shards[name].replica_id = (0, 0, parallel_state.get_expert_data_parallel_rank())
            replace_prefix_for_sharding(shards, f"{number}.", f"{first + number}.{prefix}" if apart else prefix)
            result[f"{prefix}weight{number}"] = shards[name]
        return result


class _TEGroupedMLP:
    """What TEGroupedMLP.sharded_state_dict needs of a TEGroupedMLP."""

    def __init__(self, count: int, config: Any, groups: Any) -> None:
        fc1 = _GroupedLinear(count, (2 * WIDTH, HIDDEN), 0)
        fc2 = _GroupedLinear(count, (HIDDEN, WIDTH), 1)
        self._modules = {"linear_fc1": fc1, "linear_fc2": fc2}
        self.view = SimpleNamespace(
            _modules=self._modules, config=config, num_local_experts=count, ep_group=groups.ep, tp_group=groups.expt_tp
        )

    def parameters(self) -> list[Tensor]:
        return [parameter for module in self._modules.values() for parameter in module.parameters()]

    def sharded_state_dict(self, prefix: str, offsets: tuple, metadata: dict) -> dict[str, Any]:
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        return TEGroupedMLP.sharded_state_dict(self.view, prefix, offsets, metadata)  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, module in self._modules.items():
            module.load_state_dict(
                {key.removeprefix(f"{name}."): v for key, v in state.items() if key.startswith(name)}
            )


def _make(kind: str) -> Any:
    """The layer of this rank, two experts, its weights NaN; None where Megatron has no such layer (0.19: grouped)."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import experts

    from btx_nemo.config.schema import LayoutConfig
    from btx_nemo.families.config import ModelConfig, MoEConfig
    from btx_nemo.megatron.model import build_model, transformer_config

    sizes = dict(num_attention_heads=2, num_query_groups=2, head_dim=4, vocab_size=16)
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=WIDTH, moe=MoEConfig(num_experts=EXPERTS), **sizes
    )
    layout, groups = LayoutConfig(ep=2), ProcessGroupCollection.use_mpu_process_groups()
    layer: Any
    if kind == "sequential":
        layer = build_model(model, layout, transformer_engine=False).decoder.layers[0].mlp.experts
    elif kind == "te":
        layer = _TEGroupedMLP(EXPERTS // 2, transformer_config(model, layout), groups)
    elif not hasattr(experts, "GroupedMLP"):
        return None
    else:
        from megatron.core.transformer.moe import grouped_gemm_util

        with mock.patch.object(grouped_gemm_util, "assert_grouped_gemm_is_available"):
            layer = experts.GroupedMLP(EXPERTS // 2, transformer_config(model, layout), groups)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    return layer


def _weights(kind: str, layer: Any) -> State:
    """The layer's weights expert by expert."""
    if kind == "grouped":  # [H, experts x 2F] and [experts x F, H], but as they lie in memory: expert by expert
        fc1 = layer.weight1.detach().view(-1, HIDDEN, 2 * WIDTH).transpose(1, 2)
        fc2 = layer.weight2.detach().view(-1, WIDTH, HIDDEN).transpose(1, 2)
        return {"linear_fc1": fc1.contiguous(), "linear_fc2": fc2.contiguous()}
    if kind == "te":
        return {name: torch.stack([p.detach() for p in module.parameters()]) for name, module in layer._modules.items()}
    names = ("linear_fc1", "linear_fc2")
    return {name: torch.stack([getattr(e, name).weight.detach() for e in layer.local_experts]) for name in names}


def _within_megatron(kind: str, spelling: dict[str, bool], what: Any) -> State | None:
    from btx_nemo.config.schema import LayoutConfig
    from btx_nemo.megatron.load import METADATA
    from btx_nemo.megatron.parallel import parallel_state

    # Megatron's writer starts processes, which a daemon, as the pool's ranks are, may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with parallel_state(LayoutConfig(ep=2), seed=0):
        layer = _make(kind)
        if layer is None:
            return None
        what(layer, {**METADATA, **spelling})
        return _weights(kind, layer)


def saves(kind: str, folder: str, spelling: dict[str, bool]) -> State | None:
    """Saves the layer with numbers that no two weights share; what the rank has of them; None without such a layer."""

    def save(layer: Any, metadata: dict[str, Any]) -> None:
        from megatron.core import dist_checkpointing

        with torch.no_grad():
            for number, parameter in enumerate(layer.parameters()):
                first = 1000 * torch.distributed.get_rank() + 10_000 * number
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + first)
        state = layer.sharded_state_dict(PREFIX, (), dict(metadata))
        dist_checkpointing.save(state, folder, content_metadata=metadata)

    return _within_megatron(kind, spelling, save)


def loads(kind: str, folder: str) -> State | None:
    """The layer as Megatron loads it from a folder, in the spelling that this states; None without such a layer."""

    def load(layer: Any, metadata: dict[str, Any]) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.validation import StrictHandling

        metadata |= dist_checkpointing.load_content_metadata(folder)
        asked = layer.sharded_state_dict(PREFIX, (), dict(metadata))
        state, missing, _ = dist_checkpointing.load(asked, folder, strict=StrictHandling.RETURN_ALL)
        # Layers ask for Transformer Engine's FP8 state too, empty ones at that, which converted weights do not have.
        beyond = [key for key in missing if not key.endswith("._extra_state")]
        assert not beyond, f"the checkpoint has no {beyond}"
        layer.load_state_dict({key.removeprefix(PREFIX): value for key, value in state.items() if PREFIX in key})

    return _within_megatron(kind, {}, load)
