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


@st.composite
def cases(draw: st.DrawFn, least: int = 2) -> tuple[Tensor, Tensor, int, int]:
    """Logits, valid tokens (one at least), sequences, and k; float64, float32 or bfloat16 values, ties among them."""
    rows, sequences, experts = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(least, 4))
    value = st.sampled_from([0.0, 1.0]) | st.floats(-3, 3, width=32)
    values = draw(st.lists(value, min_size=rows * sequences * experts, max_size=rows * sequences * experts))
    valid = draw(st.lists(st.booleans(), min_size=rows * sequences, max_size=rows * sequences).filter(any))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    logits = torch.tensor(values, dtype=torch.float64).view(-1, experts).to(dtype)
    return logits, torch.tensor(valid), sequences, draw(st.integers(1, experts))


def agree(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], references: tuple[Tensor, ...]) -> None:
    """Values and gradients, within what the inputs' dtype can tell."""
    dtype = inputs[0].dtype
    exact = dtype == torch.float64
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-10 if exact else 1e-4, rel=1e-10 if exact else 1e-5)
    found = torch.autograd.grad(ours, inputs, allow_unused=True)
    expected = torch.autograd.grad(theirs, references, allow_unused=True)
    rounding = {torch.float64: 0.0, torch.float32: 1e-4, torch.bfloat16: 2**-8}[dtype]
    for mine, other, x in zip(found, expected, inputs):
        mine, other = (torch.zeros_like(x) if g is None else g for g in (mine, other))
        scale = 1 + other.abs().max().item()
        torch.testing.assert_close(
            mine.double(), other.double(), atol=1e-9 if exact else 1e-5 * scale, rtol=rounding, check_dtype=False
        )


@pytest.mark.parametrize("name", ["btx", "switch", "hf", "switch_seq", "switch_global", "importance", "z"])
@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_equals_a_naive_loop_with_its_gradient_and_padding(name: str, case: tuple[Tensor, Tensor, int, int]) -> None:
    """Logits are fp32, whatever they come from: gradients through gates and softmax meet before they are rounded."""
    values, valid, sequences, k = case
    experts = values.shape[1]
    ours, theirs = values.clone().requires_grad_(), values.double().requires_grad_()
    logits = ours if ours.dtype == torch.float64 else ours.float()
    load = torch.arange(1.0, experts + 1, dtype=torch.float64) * k / sum(range(1, experts + 1))
    mask = valid[:, None]
    d = Decision(
        logits,
        *top_k_gates(logits, k),
        top_k=k,
        mean=lambda x: (x * mask).sum(0) / mask.sum(),
        sequences=sequences,
        global_load_E=load,
    )
    rows = [naive.gates("top_k", row, k) for row in theirs]
    expected = naive.loss(name, theirs, rows, valid.tolist(), k, sequences, load.tolist())
    agree(LOSSES[name](d), expected, (ours,), (theirs,))


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_the_load_loss_is_the_chance_that_fresh_noise_selects(case: tuple[Tensor, Tensor, int, int], seed: int) -> None:
    values, valid, _, k = case
    experts = values.shape[1]
    values, k = (values if values.dtype == torch.float64 else values.float()), min(k, experts - 1)
    generator = torch.Generator().manual_seed(seed)
    noise, epsilon = torch.randn(2, *values.shape, dtype=torch.float64, generator=generator).to(values.dtype)
    inputs = values.clone().requires_grad_(), noise.clone().requires_grad_()
    references = values.double().requires_grad_(), noise.double().requires_grad_()
    noisy = noisy_logits(*inputs, epsilon)
    scale = torch.nn.functional.softplus(inputs[1])
    mask = valid[:, None]
    mean = lambda x: (x * mask).sum(0) / mask.sum()  # noqa: E731
    d = Decision(noisy, *top_k_gates(noisy, k), top_k=k, mean=mean, clean_TE=inputs[0], noise_scale_TE=scale)
    noisy = noisy_logits(*references, epsilon.double())
    scale = torch.nn.functional.softplus(references[1])
    tokens = [t for t in range(len(values)) if valid[t]]
    chances = [[naive.chance(references[0][t], noisy[t], scale[t], e, k) for t in tokens] for e in range(experts)]
    expected = naive.squared_cv([sum(chances[e]) / len(tokens) for e in range(experts)])  # type: ignore[misc]
    agree(load(d), expected, inputs, references)


def test_switch_equals_megatrons_function() -> None:
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    logits = torch.randn(32, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d = Decision(logits, *top_k_gates(logits, 2), top_k=2)
    theirs = switch_load_balancing_loss_func(
        logits.softmax(-1), d.selected_TE.sum(0), total_num_tokens=32, topk=2, num_experts=6, moe_aux_loss_coeff=1.0
    )
    assert switch(d).item() == pytest.approx(theirs.item(), abs=1e-12)
