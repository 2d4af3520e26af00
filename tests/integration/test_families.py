"""Mixtures of every family: copies mixed are the seed, in the native architecture where there is one, and come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from btx_testing import jobs
from btx_testing.models import hf_logits, make_model, probe_tokens
from btx_testing.pool import RankPool
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.convert.hf_moe import register_auto_classes
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.errors import UserError
from btx_nemo.families.architecture import read_config
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

TARGETS = {
    "llama-yarn": "mixtral",
    "mistral-window": "mixtral",
    "qwen2": "qwen2_moe",
    "qwen2-window": "qwen2_moe",
    "qwen3": "qwen3_moe",
    "qwen3-bias": "qwen3_moe",
    "olmo2": "flex_olmo",
    "olmo2-bias": "flex_olmo",
    "llama-bias": "btx_moe",  # Mixtral has no biases
    "olmo3": "btx_moe",  # FlexOlmo has no sliding window
    "olmo3-yarn": "btx_moe",
}
"""Dense family -> the architecture of its mixture."""


def mix_of(tmp_path: Path, name: str, *, copies: bool, **changes: object) -> tuple[Path, Path]:
    """A seed, and its mixture with two specialists: copies of it, or models of their own."""
    seeds = [make_model(tmp_path / str(n), name, seed=0 if copies else n) for n in range(3)]
    experts = {"math": str(seeds[1]), "code": str(seeds[2])}
    mix = tmp_path / "mix"
    run_mix(MixConfig(seed=str(seeds[0]), experts=experts, out=str(mix), router_init_std=0.5, workers=2, **changes))
    return seeds[0], mix


@pytest.mark.parametrize("name", TARGETS)
def test_copies_mixed_are_the_seed(tmp_path: Path, name: str) -> None:
    register_auto_classes()
    seed, mix = mix_of(tmp_path, name, copies=True)
    assert json.loads((mix / "config.json").read_text())["model_type"] == TARGETS[name]
    torch.testing.assert_close(hf_logits(mix, probe_tokens()), hf_logits(seed, probe_tokens()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen2-window", "olmo2", "olmo3-yarn"])
def test_a_mixture_comes_back_trains_and_leaves_again(ranks: RankPool, tmp_path: Path, name: str) -> None:
    register_auto_classes()
    _, mix = mix_of(tmp_path, name, copies=False)
    line = import_hf(mix, tmp_path / "ckpt", verify="true")
    assert "logits on the probe differ by at most" in line
    layout = {"tp": 1, "pp": 2, "ep": 1}
    for logits in ranks.run(jobs.logits, str(tmp_path / "ckpt"), layout, probe_tokens(), ranks=2):
        if logits is not None:
            torch.testing.assert_close(logits, hf_logits(mix, probe_tokens()), atol=1e-4, rtol=0)
    batch = jobs.random_batch(256, total=2, length=32)
    history = ranks.run(jobs.one_step, str(tmp_path / "ckpt"), layout, batch, {"steps": 4}, ranks=2)[0]["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    assert same_bits(load_folder(mix), load_folder(tmp_path / "back"))
    assert read_config(mix) == read_config(tmp_path / "back")


RULES = {
    "soft": ({"router": "soft"}, "mixtral"),
    "switch": ({"router": "switch", "top_k": 1, "options": {"capacity_factor": 0}}, "qwen2_moe"),
    "shares of all": ({"top_k": 3, "options": {"softmax": "before", "renormalise": False}}, "qwen2_moe"),
    "switch with a capacity": ({"router": "switch", "top_k": 1}, "btx_moe"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_routing_rule_takes_the_architecture_that_knows_it(ranks: RankPool, tmp_path: Path, rule: str) -> None:
    """A Llama's mixture; what is written computes what Megatron does, and comes back as the same function."""
    changes, target = RULES[rule]
    register_auto_classes()
    import_hf(make_model(tmp_path / "hf", "mixtral", seed=9), tmp_path / "ckpt")
    settings = json.loads((tmp_path / "ckpt" / "model.json").read_text())
    settings["moe"] |= changes
    (tmp_path / "ckpt" / "model.json").write_text(json.dumps(settings))
    line = export_hf(tmp_path / "ckpt", tmp_path / "out", verify="true" if target != "btx_moe" else "tensors")
    assert line.startswith(f"{target}, which computes what the model does")
    if target == "btx_moe":  # what is dropped over a capacity depends on the batch
        return
    (logits,) = ranks.run(jobs.logits, str(tmp_path / "ckpt"), {}, probe_tokens(), ranks=1)
    torch.testing.assert_close(hf_logits(tmp_path / "out", probe_tokens()), logits, atol=1e-4, rtol=0)
    import_hf(tmp_path / "out", tmp_path / "again", verify="true")


def test_a_target_that_is_not_exact_is_refused_with_its_reason(tmp_path: Path) -> None:
    _, mix = mix_of(tmp_path, "olmo3", copies=True)
    import_hf(mix, tmp_path / "ckpt")
    with pytest.raises(UserError, match="flex_olmo has no place for sliding_window=9"):
        export_hf(tmp_path / "ckpt", tmp_path / "x", target="flex_olmo")
    with pytest.raises(UserError, match="flex_olmo has no place for sliding_window=9"):
        export_hf(tmp_path / "ckpt", tmp_path / "x", target="flex_olmo", allow_inexact=True)
    with pytest.raises(UserError, match="target=gpt2: unknown; known: btx_moe, flex_olmo"):
        export_hf(tmp_path / "ckpt", tmp_path / "x", target="gpt2")


def test_specialists_of_another_attention_are_refused(tmp_path: Path) -> None:
    """Settings that change what a model computes, beyond the shapes of its tensors."""
    seed = make_model(tmp_path / "seed", "mistral-window")
    other = make_model(tmp_path / "other", "mistral-window", sliding_window=11)
    with pytest.raises(UserError, match=r"other: sliding_window=11 but the seed .* has 9"):
        run_mix(MixConfig(seed=str(seed), experts={"other": str(other)}, out=str(tmp_path / "mix")))
