"""RMSNorm where Megatron's local backend lacks it: sequence-parallel, over all heads at once, and after a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _normalised(x: Tensor, mean_square: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(mean_square + eps)


class RMSNorm(torch.nn.RMSNorm):
    """For the local backend: Megatron's WrappedTorchNorm refuses sequence parallelism, which needs only this mark.

    With queries and keys it normalises each head; Megatron sums its gradient over the ranks that share the heads.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=torch.float32)
        self.epsilon = eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises in fp32 and scales in the input's dtype, as the Hugging Face models do."""
        x32 = x.float()
        return self.weight * _normalised(x32, x32.square().mean(-1, keepdim=True), self.epsilon).to(x.dtype)


class QueryNorm(torch.nn.Module):
    """RMSNorm over all query heads at once (OLMo): [S, B, heads of this rank, head_dim] in and out.

    Every rank of a tensor-parallel group has the whole weight and uses its heads' part, so that Megatron's rule for
    `q_layernorm` and `k_layernorm`, to sum gradients over that group, holds for it too.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.width = hidden_size * self.heads(config)
        self.epsilon = eps
        self.weight = torch.nn.Parameter(torch.empty(self.width, dtype=torch.float32))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @staticmethod
    def heads(config: Any) -> int:
        """Heads of the whole model."""
        return config.num_attention_heads

    def forward(self, x: Tensor) -> Tensor:
        """The sum of squares runs over the heads of all ranks."""
        from megatron.core import parallel_state as mpu
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        x32 = x.float().flatten(-2)
        squares = x32.square().sum(-1, keepdim=True)
        # Each rank normalises its own part by the sum of all: forward and backward both add over the ranks.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        first = mpu.get_tensor_model_parallel_rank() * x32.shape[-1]
        weight = self.weight[first : first + x32.shape[-1]]
        # OLMo rounds once, after the weight, where Llama rounds before it.
        return (weight * _normalised(x32, squares / self.width, self.epsilon)).to(x.dtype).view_as(x)


class KeyNorm(QueryNorm):
    """The same over all key heads."""

    @staticmethod
    def heads(config: Any) -> int:
        """Key heads of the whole model."""
        return config.num_query_groups


class PostNormAdd(torch.nn.Module):
    """Takes the place of a layer's bias-dropout-add: residual + RMSNorm(x + bias), with no dropout."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.epsilon = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=torch.float32))
        # Megatron heeds the mark only where its configuration, which this module is not given, says sequence parallel.
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(
        self, training: bool, fused: bool
    ) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float | None], Tensor]:
        """What Megatron asks for: a function of ((x, bias), residual, dropout), all [S, B, H]."""

        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float | None = None) -> Tensor:
            x, bias = x_with_bias
            # Megatron calls this with gradients on, whatever they were around the layer.
            with torch.set_grad_enabled(training or x.requires_grad or residual.requires_grad):
                x32 = (x if bias is None else x + bias).float()
                normed = self.weight * _normalised(x32, x32.square().mean(-1, keepdim=True), self.epsilon)
                return residual + normed.to(x.dtype)  # rounded once, after the weight, as OLMo does

        return add
