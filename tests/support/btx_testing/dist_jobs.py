"""Checkpoints through Megatron's own dist_checkpointing, run on a gloo rank."""

from __future__ import annotations

import torch


def mcore_reads(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, loaded by megatron.core.dist_checkpointing."""
    from megatron.core import dist_checkpointing

    from btx_nemo.megatron.platform import cpu_platform

    with cpu_platform():
        state = dist_checkpointing.load_plain_tensors(folder)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def mcore_writes(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """Save tensors with megatron.core.dist_checkpointing, each of two rows or more as two parts, with other objects."""
    import multiprocessing

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from btx_nemo.megatron.platform import cpu_platform

    state: dict = {"progress": {"step": 3}, "rng": ShardedObject("rng_state", {"a": 1}, (1,), (0,))}
    for key, value in tensors.items():
        if value.shape[0] % 2:
            state[key] = ShardedTensor.from_rank_offsets(key, value)
            continue
        for half, part in enumerate(value.chunk(2)):
            state[f"{key}/{half}"] = ShardedTensor.from_rank_offsets(key, part, (0, half, 2))
    moment = torch.zeros(4)
    state["moment"] = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.w", moment)
    # Megatron's writer starts processes, which a daemon, as the pool's ranks are, may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with cpu_platform():
        dist_checkpointing.save(state, folder, content_metadata={"kind": "test"})


def grouped_experts(folder: str, metadata: dict[str, bool]) -> dict[str, torch.Tensor] | None:
    """Saves a layer's experts in GroupedMLP's layout, two a rank, by its own sharded_state_dict; returns the rank's.

    None where Megatron has no GroupedMLP (0.19). Nothing is computed with it: its kernels need a GPU.
    """
    import multiprocessing
    from unittest import mock

    from btx_nemo.config.schema import LayoutConfig
    from btx_nemo.families.config import ModelConfig, MoEConfig
    from btx_nemo.megatron.load import METADATA
    from btx_nemo.megatron.model import transformer_config
    from btx_nemo.megatron.parallel import parallel_state

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    layout = LayoutConfig(ep=2)
    with parallel_state(layout, seed=0):
        from megatron.core import dist_checkpointing
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe import experts

        if not hasattr(experts, "GroupedMLP"):
            return None
        from megatron.core.transformer.moe import grouped_gemm_util

        sizes = dict(num_attention_heads=2, num_query_groups=2, head_dim=4, vocab_size=16)
        model = ModelConfig(num_layers=1, hidden_size=8, ffn_hidden_size=6, moe=MoEConfig(num_experts=4), **sizes)
        config = transformer_config(model, layout)
        with mock.patch.object(grouped_gemm_util, "assert_grouped_gemm_is_available"):
            module = experts.GroupedMLP(2, config, ProcessGroupCollection.use_mpu_process_groups())
        rank = torch.distributed.get_rank()
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 1000 * rank + 10_000 * number)
        spelling = {**METADATA, **metadata}
        state = module.sharded_state_dict("decoder.layers.0.mlp.experts.", (), dict(spelling))
        dist_checkpointing.save(state, folder, content_metadata=spelling)
        # [H, experts x 2F] and [experts x F, H], as they lie in memory, by expert and transposed.
        fc1 = module.weight1.detach().view(2, 8, 12).transpose(1, 2)
        fc2 = module.weight2.detach().view(2, 6, 8).transpose(1, 2)
        return {"linear_fc1": fc1.contiguous(), "linear_fc2": fc2.contiguous()}
