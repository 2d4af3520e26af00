"""Megatron against transformers, and every layout against one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import jobs
from btx_testing.models import hf_logits, make_llama, make_mixtral, probe_tokens
from btx_testing.pool import RankPool

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
LAYOUTS = [
    pytest.param({"tp": 2, "pp": 1, "ep": 1}, 2, id="tp2"),
    pytest.param({"tp": 2, "pp": 1, "ep": 1}, 4, id="tp2-dp2"),
    pytest.param({"tp": 2, "pp": 1, "ep": 2}, 4, id="tp2-ep2-dp2"),
    pytest.param({"tp": 2, "pp": 1, "ep": 2}, 2, id="tp2-ep2"),
    pytest.param({"tp": 1, "pp": 2, "ep": 2}, 4, id="pp2-ep2-dp2"),
    pytest.param({"tp": 2, "pp": 2, "ep": 2}, 4, id="tp2-pp2-ep2"),
    pytest.param({"tp": 1, "pp": 1, "ep": 4}, 4, id="ep4-dp4"),
    pytest.param({"tp": 2, "pp": 1, "ep": 4}, 4, id="tp2-ep4-dp2"),
    pytest.param({"tp": 1, "pp": 4, "ep": 1}, 4, id="pp4"),
    pytest.param({"tp": 1, "pp": 1, "ep": 1}, 2, id="dp2"),
    pytest.param({"cp": 2}, 2, id="cp2"),
    pytest.param({"tp": 2, "cp": 2, "ep": 2}, 4, id="tp2-cp2-ep2"),
    pytest.param({"pp": 2, "vpp": 2}, 2, id="pp2-vpp2"),
    pytest.param({"etp": 2}, 2, id="etp2"),
    pytest.param({"tp": 2, "ep": 2, "etp": 2}, 4, id="tp2-ep2-etp2"),
]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixtral(tmp_path_factory.mktemp("mixtral") / "hf", seed=1)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="gqa"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"head_dim": 16}, id="wide-heads"),
        pytest.param({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, id="llama3-rope"),
        pytest.param({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, id="linear-rope"),
        pytest.param({"kind": "Mistral", "sliding_window": None}, id="mistral"),
        pytest.param({"rms_norm_eps": 1e-2, "num_key_value_heads": 8}, id="eps-mha"),
    ],
)
@pytest.mark.parametrize(("layout", "ranks_wanted"), [({}, 1), ({"tp": 2}, 2), ({"tp": 2, "pp": 2}, 4)])
def test_dense_logits_equal_transformers(
    ranks: RankPool, tmp_path: Path, changes: dict[str, Any], layout: dict[str, int], ranks_wanted: int
) -> None:
    folder, tokens = make_llama(tmp_path / "hf", seed=1, **changes), probe_tokens()
    results = ranks.run(jobs.logits, str(folder), layout, tokens, ranks=ranks_wanted)
    expected = hf_logits(folder, tokens)
    last = [result for result in results if result is not None]
    assert len(last) == layout.get("tp", 1)
    for result in last:
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("layout", "ranks_wanted"),
    [
        ({}, 1),
        ({"tp": 2, "ep": 2}, 2),
        ({"tp": 2, "pp": 2, "ep": 2}, 4),
        ({"cp": 2}, 2),
        ({"tp": 2, "pp": 2, "vpp": 2}, 4),
    ],
)
def test_mixture_logits_equal_transformers(
    ranks: RankPool, mixtral: Path, layout: dict[str, int], ranks_wanted: int
) -> None:
    tokens = probe_tokens()
    expected = hf_logits(mixtral, tokens)
    found = ranks.run(jobs.logits, str(mixtral), layout, tokens, ranks=ranks_wanted)
    assert sum(result is not None for result in found) == ranks_wanted // layout.get("pp", 1)
    for result in found:
        if result is not None:
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("layout", "ranks_wanted"), LAYOUTS)
def test_steps_agree_across_layouts(ranks: RankPool, mixtral: Path, layout: dict[str, int], ranks_wanted: int) -> None:
    """Loss, gradient norm, balance loss and routing of the first step, and the loss after three, within 1e-4."""
    batch, options = jobs.random_batch(256, total=4, length=32), {"steps": 3}
    (alone,) = ranks.run(jobs.one_step, str(mixtral), {}, batch, options, ranks=1)
    for spread in ranks.run(jobs.one_step, str(mixtral), layout, batch, options, ranks=ranks_wanted):
        for ours, theirs in zip(spread["history"], alone["history"]):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            # Its value is a mean over micro-batches; data parallelism only regroups them.
            assert ours["losses"]["btx"] == pytest.approx(theirs["losses"]["btx"], rel=1e-4)
        torch.testing.assert_close(
            torch.tensor(spread["history"][0]["load"]), torch.tensor(alone["history"][0]["load"]), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(
    ("layout", "ranks_wanted", "router"),
    [
        pytest.param({"ep": 2}, 2, "top_k", id="ep2"),
        pytest.param({"tp": 2, "ep": 2}, 2, "top_k", id="tp2-ep2"),
        pytest.param({"tp": 2}, 2, "sample_top1", id="tp2-sample_top1"),
        pytest.param({"tp": 2, "ep": 4}, 4, "switch", id="tp2-ep4-dp2-switch"),
    ],
)
def test_allgather_is_alltoall(
    ranks: RankPool, mixtral: Path, layout: dict[str, int], ranks_wanted: int, router: str
) -> None:
    """Three steps, so that the gradients agree as well; also for routers that send a token to any number of experts."""
    batch, moe = jobs.random_batch(256, total=4, length=32), {"router": router}
    options = {"steps": 3, "moe": moe}
    (alone,) = ranks.run(jobs.one_step, str(mixtral), {}, batch, options, ranks=1)
    options = {**options, "moe": {**moe, "dispatcher": "allgather"}}
    for gathered in ranks.run(jobs.one_step, str(mixtral), layout, batch, options, ranks=ranks_wanted):
        for ours, theirs in zip(gathered["history"], alone["history"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            torch.testing.assert_close(torch.tensor(ours["load"]), torch.tensor(theirs["load"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("pad_routing", [False, True])
def test_tokens_that_pad_experts_for_fp8_change_nothing(ranks: RankPool, mixtral: Path, pad_routing: bool) -> None:
    batch, options = jobs.random_batch(256, total=4, length=32), {"steps": 3}
    (plain,) = ranks.run(jobs.one_step, str(mixtral), {}, batch, options, ranks=1)
    options = {**options, "fp8": {"format": "hybrid", "pad_routing": pad_routing}}
    assert any(rows % 16 for rows in plain["rows"])
    for padded in ranks.run(jobs.padded_step, str(mixtral), {"tp": 2, "ep": 2}, batch, options, ranks=2):
        assert padded["rows"] and not any(rows % 16 for rows in padded["rows"])
        assert padded["routing_padded"] == pad_routing
        for ours, theirs in zip(padded["history"], plain["history"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            torch.testing.assert_close(torch.tensor(ours["load"]), torch.tensor(theirs["load"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_loss_and_gradient_norm_equal_transformers(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """The independent reference for the step itself: autograd through the Hugging Face model."""
    from transformers import AutoModelForCausalLM

    folder = (make_llama if kind == "dense" else make_mixtral)(tmp_path / "hf", seed=2)
    batch = jobs.random_batch(256, total=4, length=32)
    (ours,) = ranks.run(
        jobs.one_step, str(folder), {}, batch, {"steps": 1, "router": {"losses": {}}, "micro_batch_size": 2}, ranks=1
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits = model(batch["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt().item()
    assert ours["history"][0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert ours["history"][0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_balance_loss_moves_the_gradient_as_the_formula_says(ranks: RankPool, mixtral: Path) -> None:
    """With the balance loss alone weighted up, the gradient norm follows a naive computation on the HF model."""
    from transformers import AutoModelForCausalLM

    from btx_nemo.routers.functional import top_k_gates
    from btx_nemo.routers.losses import Decision, btx

    batch, alpha = jobs.random_batch(256, total=2, length=32), 5.0
    options = {"steps": 1, "router": {"losses": {"btx": alpha}}, "micro_batch_size": 2}
    (ours,) = ranks.run(jobs.one_step, str(mixtral), {}, batch, options, ranks=1)
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32, attn_implementation="eager")
    routed: list[torch.Tensor] = []
    for layer in model.model.layers:
        moe = getattr(layer, "mlp", None) or layer.block_sparse_moe
        moe.gate.register_forward_pre_hook(lambda module, args: routed.append(args[0].flatten(0, -2) @ module.weight.T))
    logits = model(batch["tokens"]).logits
    balance = torch.stack([btx(Decision(z, *top_k_gates(z, 2), top_k=2)) for z in routed])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    (loss + alpha * balance.sum()).backward()
    norm = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert ours["history"][0]["losses"]["btx"] == pytest.approx(balance.tolist(), rel=1e-5)
    assert ours["history"][0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
