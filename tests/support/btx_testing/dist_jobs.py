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
