"""The balance loss against golden vectors: value and both gradients."""

from __future__ import annotations

import torch
from btx_testing.vectors import golden

from btx_nemo.routers.functional import top_k_gates
from btx_nemo.routers.losses import Decision, btx


def _loss_and_grad(detach_u: bool) -> tuple[torch.Tensor, torch.Tensor, dict]:
    case = golden("btx.lb_loss")
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64, requires_grad=True)
    k = case["inputs"]["k"]
    loss = case["inputs"]["alpha"] * btx(Decision(logits, *top_k_gates(logits, k), top_k=k), detach_u=detach_u)
    loss.backward()
    assert logits.grad is not None
    return loss, logits.grad, case["expected"]


def test_golden_loss_and_gradient_through_both_factors() -> None:
    loss, grad, expected = _loss_and_grad(detach_u=False)
    assert abs(loss.item() - expected["loss_btx"]) < 1e-12
    torch.testing.assert_close(grad, torch.tensor(expected["grad_btx_full"], dtype=torch.float64), atol=1e-12, rtol=0)


def test_golden_gradient_with_u_detached() -> None:
    loss, grad, expected = _loss_and_grad(detach_u=True)
    assert abs(loss.item() - expected["loss_btx"]) < 1e-12
    torch.testing.assert_close(grad, torch.tensor(expected["grad_u_detached"], dtype=torch.float64), atol=1e-12, rtol=0)


def test_uniform_routing_costs_one() -> None:
    logits = torch.zeros(12, 6, dtype=torch.float64)
    gates = torch.full_like(logits, 1 / 6)
    assert abs(btx(Decision(logits, gates, gates > 0, top_k=6)).item() - 1) < 1e-12
