"""Several documents in one sequence: no position attends across a border.

With rope, scores depend on the distance of two positions alone, so a document may lie anywhere in a sequence; the
positions that the data starts again with each document say where it begins.
Attention is then Megatron's local one (`attention.gathered_keys_attention`) with a mask, in Transformer Engine's layers
too: it holds the scores of all heads at once. Shape suffixes: B micro-batch, S sequence, Q this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from btx_nemo.megatron.parallel import positions_here
from btx_nemo.megatron.platform import device


def document_mask(position_ids_BS: Tensor) -> Tensor | None:
    """[B, 1, S, S] on `device()`, true where a position must not look: later, or another document. None where each
    sequence is one document, which is what attention does by itself. Positions are on the CPU, to wait for nothing."""
    length = position_ids_BS.shape[1]
    starts_BS = torch.arange(length) - position_ids_BS
    if not starts_BS.any():
        return None
    starts_BS = starts_BS.to(device(), non_blocking=True)
    hidden_BSS = starts_BS[:, :, None] != starts_BS[:, None, :]
    return (hidden_BSS | torch.ones(length, length, dtype=torch.bool, device=starts_BS.device).triu(1))[:, None]


def forward_masks(batch: Mapping[str, Tensor], model: Any) -> dict[str, Tensor | None]:
    """Arguments of GPTModel's forward: where attention must not look and, for a mixture, which tokens are padding.

    `batch` is the whole micro-batch, on the CPU; `model` may be wrapped. The masks are for what this rank has of a
    sequence. Routers leave padding out of losses, statistics and capacities.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import get_attr_wrapped_model

    gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    here_Q = positions_here(batch["tokens"].shape[1] // mpu.get_context_parallel_world_size())
    hidden = document_mask(batch["position_ids"])
    masks = {"attention_mask": hidden if hidden is None else hidden[:, :, here_Q.to(hidden.device)]}
    if "padding" in batch and gpt.config.num_moe_experts:
        masks["padding_mask"] = _as_routers_see_it(batch["padding"][:, here_Q], gpt)
    return {name: mask if mask is None else mask.to(device(), non_blocking=True) for name, mask in masks.items()}


def _as_routers_see_it(padding_BQ: Tensor, gpt: Any) -> Tensor:
    """[B, Q], or its tensor-parallel part: Megatron cuts it with the embeddings, on the first stage alone."""
    from megatron.core import parallel_state as mpu

    if gpt.pre_process or not gpt.config.sequence_parallel:
        return padding_BQ
    return padding_BQ.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)[mpu.get_tensor_model_parallel_rank()]
