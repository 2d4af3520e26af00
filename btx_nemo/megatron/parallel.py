"""Process groups: from the launcher's environment to Megatron's parallel state, and back to nothing."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import dense_width, padded_vocabulary
from btx_nemo.megatron.platform import backend, cpu_platform, select_device
from btx_nemo.routers.ranks import context_positions


def world_size() -> int:
    """Ranks that the launcher (torchrun, srun) started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_layout(layout: LayoutConfig, ranks: int, model: ModelConfig) -> None:
    """Raises UserError, naming both numbers, when the layout fits neither the ranks nor the model."""
    for name in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        if getattr(layout, name) < 1:
            raise UserError(f"layout.{name}={getattr(layout, name)}: must be 1 or more")
    moe = model.moe
    for name, verb in (("ep", "spread"), ("etp", "cut")):
        if getattr(layout, name) > 1 and moe is None:
            raise UserError(
                f"layout.{name}={getattr(layout, name)}: the model is dense, it has no experts to {verb}; "
                f"set layout.{name}=1"
            )
    if layout.vpp > 1 and layout.pp == 1:
        raise UserError(f"layout.vpp={layout.vpp}: virtual stages need a pipeline; give layout.pp, or layout.vpp=1")
    only_experts = all(map(model.is_mixture, range(model.num_layers)))
    divided = [
        ("tp", layout.tp, "num_attention_heads", model.num_attention_heads),
        ("tp", layout.tp, "num_query_groups", model.num_query_groups),
        ("tp", layout.tp, "ffn_hidden_size (dense layers)", 0 if only_experts else dense_width(model)),
        ("tp", layout.tp, "vocab_size (padded)", padded_vocabulary(model.vocab_size)),
        ("tp", layout.tp, "shared_expert_intermediate_size", (moe and moe.shared_expert_intermediate_size) or 0),
        ("pp", layout.pp, "num_layers", model.num_layers),
        ("pp x vpp", layout.pp * layout.vpp, "num_layers", model.num_layers),
        ("etp", layout.etp, "ffn_hidden_size", model.ffn_hidden_size),
        ("ep", layout.ep, "num_experts", moe.num_experts if moe else layout.ep),
    ]
    for name, parts, what, size in divided:
        if size % parts:
            raise UserError(f"layout.{name}={parts} does not divide the model's {what}={size}; choose a divisor")
    share = layout.tp * layout.pp * layout.cp
    if ranks % share:
        cp = f" x cp={layout.cp}" if layout.cp > 1 else ""
        raise UserError(
            f"layout: tp={layout.tp} x pp={layout.pp}{cp} does not divide the {ranks} ranks that were started; "
            f"start a multiple of {share} (torchrun --nproc-per-node), or lower one of them"
        )
    if (ranks // layout.pp) % (layout.ep * layout.etp):
        etp = f" x etp={layout.etp}" if layout.etp > 1 else ""
        raise UserError(
            f"layout.ep={layout.ep}{etp} does not divide the {ranks // layout.pp} ranks of a pipeline stage; "
            "choose a divisor"
        )


def check_batch(layout: LayoutConfig, *, seq_length: int, microbatches: int) -> None:
    """Raises UserError when the layout cannot cut the sequences, or its schedule take the step's micro-batches."""
    parts = layout.tp if layout.cp == 1 else 2 * layout.cp * layout.tp
    if seq_length % parts:
        what = "sequence parallelism needs a multiple of tp" if layout.cp == 1 else "a multiple of 2 x cp x tp"
        raise UserError(f"data.seq_length={seq_length}: layout tp={layout.tp} cp={layout.cp}: {what}, {parts}")
    if layout.vpp > 1 and microbatches % layout.pp:
        raise UserError(
            f"layout.vpp={layout.vpp}: the interleaved schedule needs a multiple of pp={layout.pp} micro-batches, "
            f"not {microbatches} a step and rank; change global_batch_size or micro_batch_size, or set layout.vpp=1"
        )


def positions_here(length: int) -> Tensor:
    """Positions in the whole sequence of the `length` that this context-parallel rank has, on the CPU."""
    from megatron.core import parallel_state as mpu

    return context_positions(length, mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())


def context_parallel_part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this context-parallel rank has of a micro-batch's tensors [B, S]; [B] stay. See `routers/ranks.py`."""
    from megatron.core import parallel_state as mpu

    ranks = mpu.get_context_parallel_world_size()
    if ranks == 1:
        return batch
    positions = positions_here(batch["tokens"].shape[1] // ranks).to(batch["tokens"].device)
    return {key: value.index_select(1, positions) if value.dim() == 2 else value for key, value in batch.items()}


@contextlib.contextmanager
def parallel_state(layout: LayoutConfig, *, seed: int, timeout_minutes: int = 30) -> Iterator[None]:
    """torch.distributed and Megatron's process groups for `layout` while entered, torn down on leaving.

    A collective fails that waits for other ranks longer than `timeout_minutes`.

    Reads RANK, WORLD_SIZE and MASTER_* as torchrun sets them; without them this process is the only rank. Joins a
    torch.distributed that is initialised already, and then leaves it as it was.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_platform())
        if not dist.is_initialized():
            _init_distributed(timeout_minutes)
            stack.callback(dist.destroy_process_group)
        from megatron.core import parallel_state as mpu
        from megatron.core import tensor_parallel

        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=timeout_minutes,
        )
        stack.callback(mpu.destroy_model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield


def _init_distributed(timeout_minutes: int) -> None:
    minutes = datetime.timedelta(minutes=timeout_minutes)
    select_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend(), timeout=minutes)
    else:
        dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=minutes)
