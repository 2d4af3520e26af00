"""The losses against golden vectors, naive loops with gradients, padding, and Megatron's own functions."""

from __future__ import annotations

import pytest
import torch
from btx_testing import naive
from btx_testing.vectors import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from btx_nemo.routers.functional import grouped_top_k_gates, noisy_logits, top_k_gates
from btx_nemo.routers.losses import LOSSES, Decision, btx, hf, importance, load, switch


def _loss_and_grad(detach_u: bool) -> tuple[Tensor, Tensor, dict]:
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


def test_golden_counts() -> None:
    case = golden("btx.lb_loss")
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64)
    d = Decision(logits, *top_k_gates(logits, 2), top_k=2)
    assert case["inputs"]["alpha"] * switch(d).item() == pytest.approx(case["expected"]["loss_megatron"], abs=1e-12)
    assert case["inputs"]["alpha"] * hf(d).item() == pytest.approx(case["expected"]["loss_hf"], abs=1e-12)


def test_golden_divmoe_counts_its_own_selection() -> None:
    case = golden("divmoe.aux_loss")
    logits = torch.tensor(case["inputs"]["S"], dtype=torch.float64).flatten(1)
    d = Decision(logits, *grouped_top_k_gates(logits, 4, 2), top_k=2)
    assert d.selected_TE.sum(0).tolist() == case["expected"]["counts"]
    alpha = case["inputs"]["alpha"]
    assert alpha * switch(d).item() == pytest.approx(case["expected"]["loss_norm_k"], abs=1e-12)
    assert alpha * hf(d).item() == pytest.approx(case["expected"]["loss_no_k"], abs=1e-12)


def test_golden_importance() -> None:
    case = golden("shazeer.importance_cv2")
    gates = torch.tensor([case["inputs"]["importance"]], dtype=torch.float64)
    assert importance(Decision(gates, gates, gates > 0, top_k=4)).item() == pytest.approx(case["expected"]["cv2"])


def test_uniform_routing_costs_one() -> None:
    logits = torch.zeros(12, 6, dtype=torch.float64)
    gates = torch.full_like(logits, 1 / 6)
    d = Decision(logits, gates, gates > 0, top_k=6)
    assert all(LOSSES[name](d).item() == pytest.approx(1) for name in ("btx", "switch", "switch_seq", "switch_global"))


@pytest.mark.parametrize("name", ["btx", "switch", "hf", "switch_seq", "importance", "z"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_a_naive_loop_with_its_gradient_and_padding(name: str, data: st.DataObject) -> None:
    rows, sequences, experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    k = data.draw(st.integers(1, experts))
    value = st.sampled_from([0.0, 1.0]) | st.floats(-3, 3, width=32)
    values = data.draw(st.lists(value, min_size=rows * sequences * experts, max_size=rows * sequences * experts))
    valid = data.draw(st.lists(st.booleans(), min_size=rows * sequences, max_size=rows * sequences).filter(any))
    logits = torch.tensor(values, dtype=torch.float64).view(-1, experts)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    mask = torch.tensor(valid)[:, None]
    d = Decision(
        ours,
        *top_k_gates(ours, k),
        top_k=k,
        mean=lambda x: (x * mask).sum(0) / mask.sum(),
        sequences=sequences,
    )
    loss = LOSSES[name](d)
    expected = naive.loss(name, theirs, [naive.gates("top_k", row, k) for row in theirs], valid, k, sequences)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=0)


def test_the_load_loss_is_the_chance_that_fresh_noise_selects() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 8, 5, dtype=torch.float64, generator=generator)
    clean, noise = clean.requires_grad_(), noise.requires_grad_()
    noisy = noisy_logits(clean, noise, torch.randn(8, 5, dtype=torch.float64, generator=generator))
    scale = torch.nn.functional.softplus(noise)
    ours = load(Decision(noisy, *top_k_gates(noisy, 2), top_k=2, clean_TE=clean, noise_scale_TE=scale))
    chances = [[naive.chance(clean[t], noisy[t], scale[t], e, 2) for t in range(8)] for e in range(5)]
    theirs = naive.squared_cv([sum(chances[e]) / 8 for e in range(5)])  # type: ignore[misc]
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    for a, b in zip(*(torch.autograd.grad(x, (clean, noise), retain_graph=True) for x in (ours, theirs))):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_switch_equals_megatrons_function() -> None:
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    logits = torch.randn(32, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d = Decision(logits, *top_k_gates(logits, 2), top_k=2)
    theirs = switch_load_balancing_loss_func(
        logits.softmax(-1), d.selected_TE.sum(0), total_num_tokens=32, topk=2, num_experts=6, moe_aux_loss_coeff=1.0
    )
    assert switch(d).item() == pytest.approx(theirs.item(), abs=1e-12)
