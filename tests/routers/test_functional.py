"""The routing rule against golden vectors and a naive loop."""

from __future__ import annotations

import math

import pytest
import torch
from btx_testing.vectors import golden
from hypothesis import given, settings
from hypothesis import strategies as st

from btx_nemo.routers.functional import top_k_gates


def naive_gates(row: list[float], k: int) -> list[float]:
    kept = sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
    top = max(row[e] for e in kept)
    weights = {e: math.exp(row[e] - top) for e in kept}
    return [weights.get(e, 0.0) / sum(weights.values()) for e in range(len(row))]


def test_golden_top2() -> None:
    case = golden("btx.top2_gates")
    logits = torch.tensor([case["inputs"]["z"]], dtype=torch.float64)
    gates, selected = top_k_gates(logits, case["inputs"]["k"])
    expected = torch.tensor([case["expected"]["g"]], dtype=torch.float64)
    torch.testing.assert_close(gates, expected, atol=1e-12, rtol=0)
    assert torch.equal(selected, expected > 0)


@settings(max_examples=200, deadline=None)
@given(
    # Few distinct values: ties are the rule, not the exception.
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0]), min_size=n, max_size=n), min_size=1, max_size=5),
            st.integers(1, n),
        )
    )
)
def test_equals_naive_loop_ties_to_lowest_index(case: tuple[list[list[float]], int]) -> None:
    rows, k = case
    gates, selected = top_k_gates(torch.tensor(rows, dtype=torch.float64), k)
    expected = torch.tensor([naive_gates(row, k) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(gates, expected, atol=1e-12, rtol=0)
    assert (selected.sum(dim=1) == k).all()


def test_gates_are_mixtrals_rule() -> None:
    """Softmax over all, top-k, renormalise: the rule of the Hugging Face target."""
    logits = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gates, _ = top_k_gates(logits, 2)
    probs, index = logits.softmax(-1).topk(2)
    expected = torch.zeros_like(logits).scatter(1, index, probs / probs.sum(-1, keepdim=True))
    torch.testing.assert_close(gates, expected, atol=1e-12, rtol=0)


def test_gradient_reaches_only_the_kept_logits() -> None:
    logits = torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    gates, selected = top_k_gates(logits, 3)
    (gates * torch.arange(6)).sum().backward()
    assert logits.grad is not None
    assert (logits.grad[~selected] == 0).all() and (logits.grad[selected] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_experts_is_softmax(dtype: torch.dtype) -> None:
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    torch.testing.assert_close(top_k_gates(logits, 4)[0], logits.softmax(-1))
