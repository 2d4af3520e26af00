"""Core attention by itself, ours and Megatron's. Called on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.families.config import ModelConfig

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 24, 2, 4, 2, 16


def core_attentions(precision: str, hides: str) -> dict[str, tuple[Tensor, Tensor]]:
    """What each finds, and its gradients: name -> (ours, Megatron's). `hides`: later, window or documents."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from btx_nemo.megatron.attention import local_attention
    from btx_nemo.megatron.parallel import parallel_state

    with parallel_state(LayoutConfig(), seed=0):
        ours, theirs = (_run(cls, precision, hides) for cls in (local_attention(), DotProductAttention))
    return {name: (value, theirs[name]) for name, value in ours.items()}


def steps_backwards(precision: str, hides: str) -> set[str]:
    """Names of the operations that our backward pass goes through."""
    from btx_nemo.megatron.attention import local_attention
    from btx_nemo.megatron.parallel import parallel_state

    with parallel_state(LayoutConfig(), seed=0):
        output, _, _ = _forward(local_attention(), precision, hides)
    found, ahead = {}, [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            ahead += [before for before, _ in node.next_functions]
    return set(found.values())


def _run(attention: Any, precision: str, hides: str) -> dict[str, Tensor]:
    output, inputs, draw = _forward(attention, precision, hides)
    output.backward(torch.randn(output.shape, generator=draw).to(output.dtype))
    gradients = {name: value.grad for name, value in inputs.items() if value.grad is not None}
    return {"output": output.detach(), **gradients}


def _forward(attention: Any, precision: str, hides: str) -> tuple[Tensor, dict[str, Tensor], torch.Generator]:
    from megatron.core.transformer.enums import AttnMaskType

    from btx_nemo.megatron.documents import document_mask
    from btx_nemo.megatron.model import transformer_config
    from btx_nemo.megatron.precision import DTYPES

    window = {"sliding_window": 5, "layer_types": ["sliding_attention"]} if hides == "window" else {}
    model = ModelConfig(
        num_layers=1, hidden_size=HEADS * WIDTH, ffn_hidden_size=8, num_attention_heads=HEADS, num_query_groups=GROUPS,
        head_dim=WIDTH, vocab_size=8, **window,
    )  # fmt: skip
    module = attention(transformer_config(model, LayoutConfig(), precision=precision), 1, AttnMaskType.causal, "self")
    positions = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])[None].expand(BATCH, -1)
    mask = document_mask(positions) if hides == "documents" else None
    draw = torch.Generator().manual_seed(4)
    shapes = {"query": HEADS, "key": GROUPS, "value": GROUPS}
    inputs = {
        name: torch.randn(LENGTH, BATCH, heads, WIDTH, generator=draw).to(DTYPES[precision]).requires_grad_()
        for name, heads in shapes.items()
    }
    return module(**inputs, attention_mask=mask), inputs, draw
