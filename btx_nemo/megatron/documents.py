"""Several documents in one sequence: no position attends across a border.

With rope, scores depend on the distance of two positions alone, so a document may lie anywhere in a sequence; the
positions that the data starts again with each document say where it begins.
Shape suffixes: B micro-batch, S sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from btx_nemo.megatron.platform import device


def document_mask(position_ids_BS: Tensor) -> Tensor | None:
    """[B, 1, S, S], true where a position must not look: later, or another document. None where each sequence is one
    document, which is what attention does by itself."""
    length = position_ids_BS.shape[1]
    starts_BS = torch.arange(length) - position_ids_BS
    if not starts_BS.any():
        return None
    hidden_BSS = starts_BS[:, :, None] != starts_BS[:, None, :]
    return (hidden_BSS | torch.ones(length, length, dtype=torch.bool).triu(1))[:, None]


def forward_masks(batch: Mapping[str, Tensor], model: Any) -> dict[str, Tensor | None]:
    """Arguments of GPTModel's forward: where attention must not look and, for a mixture, which tokens are padding.

    `batch` is on the CPU, `model` may be wrapped. Routers leave padding out of losses, statistics and capacities.
    """
    from megatron.core.utils import get_attr_wrapped_model

    gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    masks = {"attention_mask": document_mask(batch["position_ids"])}
    if "padding" in batch and gpt.config.num_moe_experts:
        masks["padding_mask"] = _as_routers_see_it(batch["padding"], gpt)
    return {name: mask if mask is None else mask.to(device(), non_blocking=True) for name, mask in masks.items()}


def _as_routers_see_it(padding_BS: Tensor, gpt: Any) -> Tensor:
    """[B, S], or this rank's part of the sequence: Megatron cuts it with the embeddings, on the first stage alone."""
    from megatron.core import parallel_state as mpu

    if gpt.pre_process or not gpt.config.sequence_parallel:
        return padding_BS
    return padding_BS.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)[mpu.get_tensor_model_parallel_rank()]


@functools.cache
def document_attention() -> Any:
    """Megatron's local core attention, which forgets a mask that it is given where a layer has a sliding window."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.utils import get_sliding_window_causal_mask

    class DocumentAttention(DotProductAttention):
        """Takes the place of Transformer Engine's too, which has no such mask. Holds all heads' scores at once."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.window = self.scale_mask_softmax.window_size

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
        ) -> Tensor:
            """As Megatron's; `attention_mask` [B, 1, S, S] is true where a position must not look."""
            if self.window is not None:
                self.scale_mask_softmax.window_size = self.window if attention_mask is None else None
                if attention_mask is not None:
                    attention_mask = attention_mask | get_sliding_window_causal_mask(len(query), len(key), self.window)
            return super().forward(query, key, value, attention_mask, *args, **kwargs)

    return DocumentAttention
