"""The routing rules against golden vectors and naive loops: values, ties and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from btx_testing import naive
from btx_testing.vectors import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from btx_nemo.routers import functional as F

# Few distinct values: ties are the rule, not the exception.
VALUES = st.sampled_from([-2.0, 0.0, 0.5, 1.0]) | st.floats(-4, 4, width=32)


@st.composite
def routing_cases(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Logits [T, groups * m], groups, and k <= groups."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(VALUES, min_size=groups * size, max_size=groups * size), min_size=1, max_size=4))
    return torch.tensor(rows, dtype=torch.float64), groups, draw(st.integers(1, groups))


def vectorised(rule: str, logits: Tensor, k: int, groups: int, noise: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    if rule == "top_k":
        return F.top_k_gates(logits, k)
    if rule == "share":
        return F.top_k_gates(logits, k, softmax_before=True, renormalise=False)
    if rule == "soft":
        return F.soft_gates(logits)
    if rule == "sample_top1":
        return F.sample_top1_gates(logits, noise, tau)
    return F.grouped_top_k_gates(logits, groups, k)


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}
"""Of values: half-precision logits are computed with in fp32. Gradients come back in the logits' own dtype."""


@pytest.mark.parametrize("rule", ["top_k", "share", "soft", "sample_top1", "divmoe"])
@settings(max_examples=150, deadline=None)
@given(case=routing_cases(), seed=st.integers(0, 99), dtype=DTYPES)
def test_equals_a_naive_loop_with_its_gradient(
    rule: str, case: tuple[Tensor, int, int], seed: int, dtype: torch.dtype
) -> None:
    values, groups, k = case
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float64) * (seed % 2)  # ties stay with zero
    noise = noise.float()
    weights, tau = torch.randn(values.shape, generator=generator, dtype=torch.float64), 0.7
    ours = values.to(dtype).requires_grad_()
    theirs = values.to(dtype).double().requires_grad_()
    gates, selected = vectorised(rule, ours, k, groups, noise, tau)
    rows = [naive.gates(rule, row, k, groups, tau, n) for row, n in zip(theirs, noise.double())]
    expected, chosen = naive.matrix(rows, values.shape[1])
    assert torch.equal(selected, chosen)
    assert gates.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(gates.double(), expected, atol=TOLERANCE[dtype], rtol=0)
    (gates * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    rounding = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=3 * TOLERANCE[dtype], rtol=rounding)


def vector(case: dict[str, Any], *path: str) -> Tensor:
    for key in path:
        case = case[key]
    return torch.tensor(case, dtype=torch.float64)


def test_golden_top2() -> None:
    case = golden("btx.top2_gates")
    gates, selected = F.top_k_gates(vector(case, "inputs", "z")[None], case["inputs"]["k"])
    torch.testing.assert_close(gates[0], vector(case, "expected", "g"), atol=1e-12, rtol=0)
    assert torch.equal(selected, gates > 0)


def test_golden_temperature() -> None:
    case = golden("btx.tau_schedule")
    assert [F.temperature(t) for t in case["inputs"]["t"]] == pytest.approx(case["expected"]["tau"], abs=1e-12)


def test_golden_capacity() -> None:
    case = golden("btx.switch_capacity")
    ids, experts, factor = torch.tensor(case["inputs"]["expert_ids"]), case["inputs"]["N"], case["inputs"]["cf"]
    chosen = torch.nn.functional.one_hot(ids, experts).bool()
    capacity = F.capacity_of(len(ids), experts, factor)
    assert capacity == case["expected"]["capacity"]
    assert F.within_capacity(chosen, capacity).any(dim=1).tolist() == case["expected"]["keep"]
    assert F.capacity_of(10, experts, factor) == case["expected"]["cap_T10_ceil"]
    case = golden("switch.capacity")
    chosen = torch.nn.functional.one_hot(torch.tensor(case["inputs"]["ids"]), 4).bool()
    assert (
        F.capacity_of(8, 4, 1.0) == case["expected"]["cap1"] and F.capacity_of(8, 4, 1.5) == case["expected"]["cap15"]
    )
    assert F.within_capacity(chosen, 2).any(dim=1).tolist() == case["expected"]["keep"]


def test_golden_switch_gate() -> None:
    case = golden("switch.top1_output")
    gates, _ = F.top_k_gates(vector(case, "inputs", "z")[None], 1, softmax_before=True, renormalise=False)
    assert gates[0].argmax() == case["expected"]["i"] and (gates > 0).sum() == 1
    assert (gates[0] @ vector(case, "inputs", "expert_out")).item() == pytest.approx(case["expected"]["y"], abs=1e-12)


def test_golden_divmoe() -> None:
    case = golden("divmoe.alg1")
    scores = vector(case, "inputs", "S")
    gates, selected = F.grouped_top_k_gates(scores.view(1, -1), scores.shape[0], case["inputs"]["k"])
    flat = [i * scores.shape[1] + j for i, j in case["expected"]["selected"]]
    assert selected[0].nonzero().flatten().tolist() == flat
    torch.testing.assert_close(gates[0, flat], vector(case, "expected", "weights"), atol=1e-12, rtol=0)


def test_golden_noise() -> None:
    case = golden("shazeer.noise")
    noisy = F.noisy_logits(*(vector(case, "inputs", name) for name in ("clean", "noise_logit", "eps")))
    torch.testing.assert_close(noisy, vector(case, "expected", "H"), atol=1e-12, rtol=0)
    case = golden("shazeer.noisy_topk")
    gates, _ = F.top_k_gates(vector(case, "inputs", "H")[None], case["inputs"]["k"])
    torch.testing.assert_close(gates[0], vector(case, "expected", "G"), atol=1e-12, rtol=0)


def test_golden_nexus() -> None:
    case = golden("nexus.projection")
    embeddings = F.project_domains(*(vector(case, "inputs", name) for name in ("d", "W1", "W2")))
    torch.testing.assert_close(embeddings, vector(case, "expected", "e"), atol=1e-12, rtol=0)
    case = golden("nexus.routing")
    logits = vector(case, "inputs", "x")[None] @ vector(case, "inputs", "e").T
    torch.testing.assert_close(logits.softmax(-1)[0], vector(case, "expected", "scores"), atol=1e-12, rtol=0)
    gates, _ = F.top_k_gates(logits, 1, softmax_before=True, renormalise=False)
    y = vector(case, "inputs", "shared_out") + gates[0] @ vector(case, "inputs", "expert_out")
    torch.testing.assert_close(y, vector(case, "expected", "y"), atol=1e-12, rtol=0)


def test_golden_flexolmo_bias() -> None:
    case = golden("flexolmo.router_bias")
    logits = vector(case, "inputs", "R") @ vector(case, "inputs", "x")
    torch.testing.assert_close(logits, vector(case, "expected", "logits"), atol=1e-12, rtol=0)
    biased = F.with_penalty(logits[None], vector(case, "inputs", "b"))[0]
    torch.testing.assert_close(biased, vector(case, "expected", "logits_biased"), atol=1e-12, rtol=0)


def test_gates_are_mixtrals_rule() -> None:
    """Softmax over all, top-k, renormalise: the rule of the Hugging Face target."""
    logits = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gates, _ = F.top_k_gates(logits, 2)
    probs, index = logits.softmax(-1).topk(2)
    expected = torch.zeros_like(logits).scatter(1, index, probs / probs.sum(-1, keepdim=True))
    torch.testing.assert_close(gates, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_experts_is_softmax(dtype: torch.dtype) -> None:
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    torch.testing.assert_close(F.top_k_gates(logits, 4)[0], logits.float().softmax(-1))


@settings(max_examples=100, deadline=None)
@given(case=routing_cases(), capacity=st.integers(1, 4))
def test_expert_choice_takes_each_experts_best_tokens(case: tuple[Tensor, int, int], capacity: int) -> None:
    logits, _, _ = case
    gates, selected = F.expert_choice_gates(logits, capacity)
    probs = logits.softmax(-1)
    for e in range(logits.shape[1]):
        best = naive.best(probs[:, e], list(range(len(logits))), capacity)
        assert selected[:, e].nonzero().flatten().tolist() == sorted(best)
    torch.testing.assert_close(gates, probs * selected)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 2), min_size=2, max_size=12), capacity=st.integers(0, 5), data=st.data())
def test_capacity_over_ranks_is_capacity_over_all(ids: list[int], capacity: int, data: st.DataObject) -> None:
    chosen = torch.nn.functional.one_hot(torch.tensor(ids), 3).bool()
    cut = data.draw(st.integers(1, len(ids) - 1))
    first = F.within_capacity(chosen[:cut], capacity)
    second = F.within_capacity(chosen[cut:], capacity, chosen[:cut].sum(dim=0))
    assert torch.equal(torch.cat([first, second]), F.within_capacity(chosen, capacity))
    for expert in range(3):  # first come, first served
        kept = [t for t in range(len(ids)) if ids[t] == expert][:capacity]
        assert F.within_capacity(chosen, capacity)[:, expert].nonzero().flatten().tolist() == kept


def test_divmoe_never_takes_two_of_a_group_whatever_the_logits() -> None:
    values = [-1.0, 0.0, 1.0]
    logits = torch.tensor(list(itertools.product(values, repeat=6)))  # every pattern of ties
    for k in (1, 2, 3):
        gates, selected = F.grouped_top_k_gates(logits, 3, k)
        assert (selected.view(-1, 3, 2).sum(-1) <= 1).all() and (selected.sum(-1) == k).all()
        torch.testing.assert_close(gates.sum(-1), torch.ones(len(logits)))


@pytest.mark.parametrize(("before", "after"), [(3, 4), (1, 16), (15, 17), (16, 17), (20, 70), (70, 200)])
def test_a_nexus_extension_leaves_the_old_logits_as_they_were(before: int, after: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w1, w2 = torch.randn(128, 24, generator=generator) / 5, torch.randn(64, 64, generator=generator) / 64
    domains, x = torch.randn(after, 24, generator=generator), torch.randn(200, 64, generator=generator)
    old, new = (F.domain_logits(x, F.project_domains(d, w1, w2)) for d in (domains[:before], domains))
    assert old.shape == (200, before)
    assert torch.equal(old, new[:, :before])
    torch.testing.assert_close(new, x @ F.project_domains(domains, w1, w2).T, rtol=1e-4, atol=1e-5)
    left = new.softmax(-1)[:, before:].sum(-1, keepdim=True)  # the old scores shrink by what the new ones take
    torch.testing.assert_close(new.softmax(-1)[:, :before], old.softmax(-1) * (1 - left), rtol=1e-3, atol=1e-6)


def test_nexus_logits_have_their_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    x, e = (torch.randn(n, 6, dtype=torch.float64, generator=generator).requires_grad_() for n in (5, 18))
    assert torch.autograd.gradcheck(F.domain_logits, (x, e))


def test_opting_an_expert_out_equals_never_having_had_it() -> None:
    logits = torch.randn(64, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    without = torch.cat([logits[:, :2], logits[:, 3:]], dim=1)
    closed = logits.clone()
    closed[:, 2] = float("-inf")
    for before in (True, False):
        ours, _ = F.top_k_gates(closed, 3, softmax_before=before, renormalise=not before)
        theirs, _ = F.top_k_gates(without, 3, softmax_before=before, renormalise=not before)
        torch.testing.assert_close(torch.cat([ours[:, :2], ours[:, 3:]], dim=1), theirs, atol=1e-15, rtol=0)
        assert (ours[:, 2] == 0).all()
