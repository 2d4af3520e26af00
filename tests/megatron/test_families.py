"""Every family in Megatron against transformers, at every kind of layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from btx_testing import jobs
from btx_testing.models import FAMILIES, MIXTURES, hf_logits, make_model, probe_tokens
from btx_testing.pool import RankPool

DENSE = [({}, 1), ({"tp": 2}, 2), ({"pp": 2}, 2)]


@pytest.mark.parametrize("name", FAMILIES)
def test_dense_logits_equal_transformers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    folder, tokens = make_model(tmp_path / "hf", name, seed=3), probe_tokens()
    expected = hf_logits(folder, tokens)
    for layout, count in DENSE:
        found = [each for each in ranks.run(jobs.logits, str(folder), layout, tokens, ranks=count) if each is not None]
        assert len(found) == layout.get("tp", 1)
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_logits_equal_transformers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    folder, tokens = make_model(tmp_path / "hf", name, seed=3), probe_tokens()
    expected = hf_logits(folder, tokens)
    for layout, count in (({}, 1), ({"tp": 2, "pp": 2, "ep": 2}, 4)):
        for logits in ranks.run(jobs.logits, str(folder), layout, tokens, ranks=count):
            if logits is not None:
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen2", "qwen3-bias", "olmo2-bias", "olmo3-yarn", "qwen2_moe-shared", "flex_olmo"])
def test_gradients_equal_transformers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Loss and gradient norm of a step, and the loss after three more: every new parameter trains as one rank's."""
    from transformers import AutoModelForCausalLM

    folder, batch = make_model(tmp_path / "hf", name, seed=2), jobs.random_batch(256, total=2, length=32)
    options = {"steps": 4, "router": {"losses": {}}}
    layout = {"tp": 2, "pp": 2}
    spread = ranks.run(jobs.one_step, str(folder), layout, batch, options, ranks=4)[0]["history"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits = model(batch["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    norm = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert spread[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert spread[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    (alone,) = ranks.run(jobs.one_step, str(folder), {}, batch, options, ranks=1)
    for ours, theirs in zip(spread, alone["history"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert spread[3]["loss"] < spread[0]["loss"]


@pytest.mark.parametrize("name", ["olmo3-yarn", "flex_olmo"])
def test_recomputation_and_half_precision_train_as_well(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """The norms after the blocks stand where Megatron turns gradients on by itself."""
    folder, batch = make_model(tmp_path / "hf", name, seed=2), jobs.random_batch(256, total=2, length=32)
    options = {"steps": 3, "router": {"losses": {}}}
    plain, recomputed, half = (
        ranks.run(jobs.one_step, str(folder), {"tp": 2}, batch, {**options, **more}, ranks=2)[0]["history"]
        for more in ({}, {"recompute": "full"}, {"precision": "bf16"})
    )
    for ours, theirs in zip(recomputed, plain, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert half[0]["loss"] == pytest.approx(plain[0]["loss"], rel=2e-2) and half[2]["loss"] < half[0]["loss"]
