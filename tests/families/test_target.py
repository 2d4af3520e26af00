"""Which of Hugging Face's architectures a model is written in, and as what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from btx_testing.tensors import MemoryReader

from btx_nemo.errors import UserError
from btx_nemo.families.architecture import SHARED
from btx_nemo.families.base import layout
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.families.inference import inference_form
from btx_nemo.families.target import Target, choose_target
from btx_nemo.plan.execute import evaluate
from btx_nemo.plan.expr import takes

NEXUS = {"router": "nexus", "top_k": 1, "options": {"embedding_size": 5}, "shared_expert_intermediate_size": 12}


def model(family: str = "llama", **moe: Any) -> ModelConfig:
    differences: dict[str, dict[str, Any]] = {
        "qwen2": {"attention_bias": "qkv"},
        "qwen3": {"qk_norm": "head"},
        "olmo2": {"qk_norm": "full", "post_norm": True},
        "olmoe": {"qk_norm": "full"},
    }
    return ModelConfig(
        family=family, num_layers=2, hidden_size=8, ffn_hidden_size=12, num_attention_heads=2, num_query_groups=2,
        head_dim=4, vocab_size=16, moe=MoEConfig(num_experts=4, **moe), **differences.get(family, {}),
    )  # fmt: skip


def chosen(model: ModelConfig, base: str | None = None, **more: Any) -> Target:
    return choose_target(model, {"model_type": base} if base else {}, "x", **more)


@pytest.mark.parametrize("base", [None, "mixtral", "btx_moe"])
def test_the_native_architecture_comes_first_and_ours_last(base: str | None) -> None:
    assert chosen(model(), base).architecture.model_type == "mixtral"
    assert chosen(model(router="divmoe", options={"groups": 2}), base).architecture.model_type == "btx_moe"
    assert chosen(model(router="switch", top_k=1), base).architecture.model_type == "btx_moe"
    ours = chosen(model(router="noisy_top_k"), base)
    assert ours.chosen.startswith(
        "btx_moe, which computes what the model does; mixtral has no place for a router (noisy_top_k)"
    )
    with pytest.raises(UserError, match=r"btx_moe does not know moe\.router=mine"):
        chosen(model(router="mine"), base)


def test_a_dense_model_is_no_mixture() -> None:
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
    dense = ModelConfig(**dict.fromkeys(names, 4), head_dim=1, vocab_size=9)
    with pytest.raises(UserError, match="btx_moe is a mixture"):
        chosen(dense, target="btx_moe")
    assert chosen(dense, "mixtral").architecture.model_type == "llama"


FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", NEXUS, "qwen2_moe"),
    ("qwen2", NEXUS, "qwen2_moe"),
    ("qwen3", NEXUS, "btx_moe"),  # no shared expert
    ("olmo2", NEXUS, "btx_moe"),
    ("llama", {"shared_expert_intermediate_size": 12}, "qwen2_moe"),
    ("llama", {"router": "flexolmo"}, "qwen2_moe"),
    ("qwen2", {"router": "flexolmo"}, "qwen2_moe"),
    ("qwen3", {"router": "flexolmo"}, "qwen3_moe"),
    ("olmo2", {"router": "flexolmo"}, "flex_olmo"),
    ("olmoe", {"router": "flexolmo"}, "olmoe"),
    ("olmo2", {"router": "flexolmo", "options": {"bias": True}}, "btx_moe"),  # no place for a bias on a logit
]


@pytest.mark.parametrize(("family", "moe", "expected"), FORMS)
def test_inference_alone_may_be_simpler(family: str, moe: dict[str, Any], expected: str) -> None:
    """Exports are; mixes, which are to be trained, and whoever asks for btx_moe keep the model as it is."""
    given = model(family, **moe)
    found = chosen(given)
    assert found.architecture.model_type == expected
    assert (found.form is not None) == (expected != "btx_moe")
    if found.form:
        assert "trains on" in found.chosen and "target=btx_moe keeps what trains" in found.chosen
        assert chosen(given, target=expected).form == found.form
    for kept in (chosen(given, to_train=True), chosen(given, target="btx_moe")):
        assert kept.architecture.model_type == "btx_moe" and kept.model is given and kept.form is None


def test_a_computed_router_is_not_rounded_unasked() -> None:
    given = model(**NEXUS)
    narrow = chosen(given, dtype="bfloat16")
    assert narrow.architecture.model_type == "btx_moe" and narrow.form is None
    rounds = "qwen2_moe would round the projected router to bfloat16 (dtype=float32 does not)"
    assert narrow.chosen.endswith(rounds)
    with pytest.raises(UserError, match="qwen2_moe would round the projected router to bfloat16"):
        chosen(given, target="qwen2_moe", dtype="bfloat16")
    asked = chosen(given, target="qwen2_moe", dtype="bfloat16", allow_inexact=True)
    assert asked.form and not asked.exact and rounds in asked.chosen
    # What is only another name or a power of two is exact in any dtype.
    assert chosen(model("olmo2", router="flexolmo"), dtype="bfloat16").architecture.model_type == "flex_olmo"
    shared = model(shared_expert_intermediate_size=12)
    assert chosen(shared, dtype="bfloat16").architecture.model_type == "qwen2_moe"


def test_the_simpler_tensors_are_the_formula_s() -> None:
    """e = W_2 SwiGLU(W_1 d) in float64 for all experts, the shared expert doubled, its gate zero; all tensors used."""
    given = model(**NEXUS)
    form = inference_form(given, "float32")
    assert form is not None and form.tensors.keys() == layout(form.model, "float32").keys()
    generator = torch.Generator().manual_seed(3)
    stored = {name: torch.randn(i.shape, generator=generator) for name, i in layout(given, "float32").items()}
    reader = MemoryReader(stored)
    infos = layout(form.model, "float32")
    found = {name: evaluate(e, {SHARED: reader}, infos[name], name, 0) for name, e in form.tensors.items()}
    assert {take.name for expr in form.tensors.values() for take in takes(expr)} == stored.keys()
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp."
        d, w1, w2 = (stored[f"{mlp}gate.{part}"].double() for part in ("domain_embeddings", "w1", "w2"))
        for number in range(4):
            halves = w1 @ d[number]
            row = w2 @ (halves[:8] / (1 + (-halves[:8]).exp()) * halves[8:])
            torch.testing.assert_close(found[f"{mlp}gate.weight"][number].double(), row, atol=1e-6, rtol=1e-6)
        down = f"{mlp}shared_expert.down_proj.weight"
        assert torch.equal(found[down], 2 * stored[down])
        assert not found[f"{mlp}shared_expert_gate.weight"].any()
        # Parts read alone are parts of the whole.
        part = evaluate(form.tensors[f"{mlp}gate.weight"], {SHARED: reader}, infos[f"{mlp}gate.weight"], "x", 0,
                        ((1, 3), (2, 7)))  # fmt: skip
        torch.testing.assert_close(part, found[f"{mlp}gate.weight"][1:3, 2:7], atol=1e-7, rtol=1e-6)
