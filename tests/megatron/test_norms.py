"""The norms' own backward pass, and what it keeps, against the formula in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from btx_nemo.megatron.norms import PostNormAdd, RMSNorm

EPS, WIDTH = 1e-5, 48
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def norm(kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Tensor]:
    """A norm before or after a block with a random weight, and its input: rows of very different sizes."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 3, WIDTH, generator=draw) * torch.tensor([1e-4, 1.0, 100.0])[:, None]
    made = PostNormAdd(WIDTH, EPS) if kind == "after" else RMSNorm(SimpleNamespace(sequence_parallel=False), WIDTH, EPS)
    made.weight.data = torch.empty(WIDTH).uniform_(0.5, 2, generator=draw)
    return made.to(dtype), rows.to(dtype).requires_grad_()


def result(module: torch.nn.Module, x: Tensor) -> Tensor:
    return module(True, False)((x, None), torch.zeros_like(x)) if isinstance(module, PostNormAdd) else module(x)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_are_the_formulas(kind: str, dtype: torch.dtype, frozen: bool) -> None:
    module, x = norm(kind, dtype)
    module.weight.requires_grad_(not frozen)
    weight, x64 = module.weight.detach().double().requires_grad_(), x.detach().double().requires_grad_()
    expected = weight * x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + EPS)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected.backward(upstream.double())
    found = result(module, x)
    found.backward(upstream)
    pairs = [(found, expected), (x.grad, x64.grad)]
    if frozen:
        assert module.weight.grad is None
    else:
        pairs.append((module.weight.grad, weight.grad))
    for mine, exact in pairs:
        assert mine is not None and exact is not None and mine.dtype == dtype
        # By row: of rows in the thousands, the gradient of x is a thousandth.
        error = (mine.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert error.max() < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_it_keeps_its_input_as_it_came(dtype: torch.dtype) -> None:
    module, x = norm("before", dtype)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module(x)
    sizes = sorted(tensor.numel() * tensor.element_size() for tensor in kept)
    assert sizes == sorted([x.numel() * x.element_size(), WIDTH * x.element_size(), 6 * 3 * 4])
