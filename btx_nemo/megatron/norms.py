"""RMSNorm where Megatron's local backend lacks it: sequence-parallel, over all heads at once, and after a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _mean(values: Tensor) -> Tensor:
    """Of each row: [..., W] -> [..., 1]."""
    return values.mean(-1, keepdim=True)


class _RootMeanSquareNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, in fp32; the result has the dtype of x.

    For the backward pass it keeps x as it came and one number a row. Left to itself, autograd would keep an fp32 copy
    of x and the normalised rows too, and take the gradient of each operation by itself. Where x is one rank's part of
    the rows, `mean` is that of whole rows, forwards of the squares and backwards of what comes down through them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        round_first: bool,
        mean: Callable[[Tensor], Tensor] = _mean,
    ) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(mean(x32.square()) + eps)
        ctx.mean = mean
        ctx.save_for_backward(x, weight, scale)
        normed = x32 * scale
        return weight * normed.to(x.dtype) if round_first else (weight * normed).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        gradient, normed = gradient.float(), x.float() * scale
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            inner = gradient * weight
            of_x = (scale * (inner - normed * ctx.mean(inner * normed))).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        return of_x, of_weight, None, None, None


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
        return _RootMeanSquareNorm.apply(x, self.weight, self.epsilon, True)


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
        """OLMo rounds once, after the weight, where Llama rounds before it."""
        from megatron.core import parallel_state as mpu

        rows = x.flatten(-2)
        first = mpu.get_tensor_model_parallel_rank() * rows.shape[-1]
        weight = self.weight[first : first + rows.shape[-1]]
        return _RootMeanSquareNorm.apply(rows, weight, self.epsilon, False, self._mean).view_as(x)

    def _mean(self, values: Tensor) -> Tensor:
        """Over the heads of all ranks."""
        from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

        return reduce_from_tensor_model_parallel_region(values.sum(-1, keepdim=True)) / self.width


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
                # Rounded once, after the weight, as OLMo does.
                return residual + _RootMeanSquareNorm.apply(
                    x if bias is None else x + bias, self.weight, self.epsilon, False
                )

        return add
