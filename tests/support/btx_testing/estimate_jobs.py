"""What a model really holds, for the estimates: parameters of a rank, and the bytes that autograd keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.model import build_model
from btx_nemo.megatron.parallel import parallel_state


def parameters(model: ModelConfig, layout: LayoutConfig) -> tuple[int, int]:
    """(pipeline stage, parameters) of this rank."""
    from megatron.core import parallel_state as mpu

    with parallel_state(layout, seed=0):
        gpt = build_model(model, layout)
        return mpu.get_pipeline_model_parallel_rank(), sum(parameter.numel() for parameter in gpt.parameters())


def kept_bytes(
    model: ModelConfig,
    layout: LayoutConfig,
    batch: int,
    length: int,
    precision: str,
    documents: bool = False,
    recompute: Mapping[str, Any] | None = None,
) -> int:
    """Bytes of all memory that autograd keeps between forward and backward, but for the parameters'.

    `documents`: two in each sequence; `recompute`: settings of the model.
    """
    from megatron.core.transformer.module import Float16Module

    from btx_nemo.megatron.documents import document_mask

    with parallel_state(layout, seed=0):
        gpt: Any = build_model(model, layout, precision=precision, documents=documents, **recompute or {})
        for parameter in gpt.parameters():
            torch.nn.init.normal_(parameter.data, std=0.02)
        own = {parameter.untyped_storage().data_ptr() for parameter in gpt.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        module = Float16Module(gpt.config, gpt) if precision == "bf16" else gpt
        tokens = torch.randint(0, model.vocab_size, (batch, length))
        positions = (torch.arange(length) % (length // 2 if documents else length)).expand(batch, -1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(tokens, positions, document_mask(positions), labels=tokens)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
