"""What the papers say their mechanisms do, at a small scale and fixed seeds: each would fail if the mechanism broke."""

from __future__ import annotations

import math

import pytest
import torch
from btx_testing.vectors import golden
from torch import Tensor

from btx_nemo.config.schema import RouterConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.execute import evaluate
from btx_nemo.plan.expr import Normal
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.routers.functional import sample_top1_gates, temperature, top_k_gates
from btx_nemo.routers.losses import LOSSES, Decision


def train_mixture(loss: str | None, weight: float, *, steps: int = 300, top_k: int = 1) -> Tensor:
    """Load of four linear experts after training on one linear map that the first knows already."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(8, 8, generator=generator)
    experts = torch.randn(4, 8, 8, generator=generator)
    experts[0] = target  # the head start
    router = 0.3 * torch.randn(4, 8, generator=generator)
    parameters = [experts.requires_grad_(), router.requires_grad_()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    loads = []
    for _ in range(steps):
        x = torch.randn(256, 8, generator=generator) + 0.5  # a mean, so that a row can favour an expert on all tokens
        logits = x @ router.T
        gates, selected = top_k_gates(logits, top_k, softmax_before=True, renormalise=False)
        y = torch.einsum("tn,nij,tj->ti", gates, experts, x)
        objective = (y - x @ target.T).square().mean()
        if loss is not None:
            objective = objective + weight * LOSSES[loss](Decision(logits, gates, selected, top_k))
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
        loads.append(selected.float().mean(0) / top_k)
    return torch.stack(loads[-50:]).mean(0)


def test_without_a_balance_loss_the_expert_with_a_head_start_takes_all() -> None:
    assert train_mixture(None, 0.0)[0] > 0.8


@pytest.mark.parametrize(
    ("loss", "weight"), [("btx", 5.0), ("switch", 5.0), ("hf", 5.0), ("switch_seq", 5.0), ("importance", 5.0)]
)
def test_with_one_it_does_not(loss: str, weight: float) -> None:
    load = train_mixture(loss, weight)
    assert load.max() < 0.5 and load.min() > 0.05


def test_sample_top1_gives_the_gradient_of_its_soft_value() -> None:
    """To all logits, through the softmax at temperature tau: neither renormalised nor straight-through."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 4, dtype=torch.float64, generator=generator).requires_grad_()
    noise = torch.randn(16, 4, dtype=torch.float64, generator=generator)
    tau = temperature(3000)
    gates, selected = sample_top1_gates(logits, noise, tau)
    y = ((logits + noise) / tau).softmax(-1).detach()
    winner = y.argmax(-1)
    assert torch.equal(selected.int().argmax(-1), winner) and (selected.sum(-1) == 1).all()
    gates.sum().backward()
    value = y.gather(1, winner[:, None])
    expected = value * (torch.nn.functional.one_hot(winner, 4) - y) / tau
    torch.testing.assert_close(logits.grad, expected, atol=1e-12, rtol=0)


def test_sampling_visits_every_expert_and_follows_the_softmax() -> None:
    """Gumbel's law: the largest of z + noise is expert i with its softmax probability."""
    from btx_nemo.routers.sample_top1 import _gumbel

    logits = torch.tensor([0.0, 1.0, -1.0, 0.5]).expand(40_000, 4)
    noise = _gumbel(torch.empty(40_000, 4), torch.Generator().manual_seed(0))
    share = sample_top1_gates(logits, noise, 0.7)[1].float().mean(0)
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=0.01, rtol=0)


def test_trained_noise_spreads_tokens_that_would_all_go_one_way() -> None:
    """Shazeer 2017: from zero weights all logits tie, and it is the noise that tells the experts apart."""
    from btx_nemo.routers.functional import noisy_logits

    clean = torch.zeros(4000, 4)
    assert top_k_gates(clean, 1)[1].sum(0).tolist() == [4000, 0, 0, 0]
    epsilon = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0))
    load = top_k_gates(noisy_logits(clean, torch.zeros(4000, 4), epsilon), 1)[1].float().mean(0)
    torch.testing.assert_close(load, torch.full((4,), 0.25), atol=0.03, rtol=0)


def test_switch_init_scale() -> None:
    from btx_nemo.routers.base import fresh_weight

    case = golden("switch.init_std")
    for hidden, std in zip(case["inputs"]["fan_in"], case["expected"]["std"]):
        model = ModelConfig(
            num_layers=1,
            hidden_size=hidden,
            ffn_hidden_size=8,
            num_attention_heads=1,
            num_query_groups=1,
            head_dim=8,
            vocab_size=8,
        )
        fresh = fresh_weight(model, RouterConfig(init_scale=case["inputs"]["s"]))
        assert fresh == Normal(pytest.approx(std, abs=1e-12), cut=2.0)  # type: ignore[arg-type]
        value = evaluate(fresh, {}, TensorInfo((64, hidden), "float32"), "router.weight", 1)
        assert value.abs().max() <= 2 * std
        cut = math.sqrt(1 - 4 * math.exp(-2) / (math.sqrt(2 * math.pi) * math.erf(math.sqrt(2))))  # of a cut normal
        assert value.std().item() == pytest.approx(std * cut, rel=0.02)
