"""What other merging tools get wrong without a word: here it is refused, or right."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from btx_testing.mixing import SMALL, add_tokenizer, make_models
from btx_testing.models import hf_logits, make_llama, probe_tokens, randomise
from btx_testing.tensors import load_folder
from safetensors.torch import save_file

from btx_nemo.errors import UserError
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix


def remake(name: str, **changes: object) -> Callable[[Path], None]:
    """Another model in place of a specialist."""

    def change(root: Path) -> None:
        make_llama(root / name, seed=7, **{**SMALL, **changes})
        add_tokenizer(root / name)

    return change


def alter(name: str, tensor: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    """One tensor replaced, added or (None) left out."""

    def change(root: Path) -> None:
        tensors = load_folder(root / name) | ({} if value is None else {tensor: value})
        if value is None:
            del tensors[tensor]
        save_file(tensors, root / name / "model.safetensors")

    return change


BIAS = "model.layers.0.self_attn.q_proj.bias"
SILENT: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bias that the settings do not mention": (alter("math", BIAS, torch.ones(32)), f"tensor '{BIAS}' has no place"),
    "a bias in the settings": (remake("math", attention_bias=True), "attention_bias|bias"),
    "one expert's rope theta": (
        remake("math", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "math: rope_theta=500000.0 but the seed .* has 10000.0",
    ),
    "another vocabulary": (remake("math", vocab_size=128), "math: vocab_size=128 but the seed .* has 96"),
    "a deeper expert": (remake("math", num_hidden_layers=3), "math: num_hidden_layers=3 but the seed .* has 2"),
    "nan": (alter("math", "model.norm.weight", torch.full((32,), torch.nan)), r"'model.norm.weight' holds .*nan"),
    "an untied head": (remake("math", tie_word_embeddings=True), "math: tie_word_embeddings=True but .* has False"),
    "a missing tensor": (
        alter("math", "model.layers.1.mlp.up_proj.weight", None),
        "no tensor 'model.layers.1.mlp.up_proj.weight'",
    ),
}


@pytest.mark.parametrize("kind", SILENT)
@pytest.mark.parametrize("recipe", ["btx", "average"])
def test_what_others_pass_over_is_refused(tmp_path: Path, kind: str, recipe: str) -> None:
    change, message = SILENT[kind]
    config = make_models(tmp_path, "math", "code")
    change(tmp_path)
    with pytest.raises(UserError, match=message):
        run_mix(dataclasses.replace(config, recipe=recipe, top_k=2 if recipe == "btx" else None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", "math", "seed"]


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math")
    run_mix(dataclasses.replace(config, recipe="average", top_k=None, out=str(tmp_path / "cut"), shard_size=20_000))
    shard = sorted((tmp_path / "cut").glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}"):
        run_mix(dataclasses.replace(config, experts={"math": str(tmp_path / "cut")}))


def test_fp32_stays_fp32_and_a_dtype_is_what_is_on_disk(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math")
    for asked, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        out = tmp_path / str(asked)
        run_mix(dataclasses.replace(config, dtype=asked, out=str(out)))
        assert {tensor.dtype for tensor in load_folder(out).values()} == {expected}
        settings = json.loads((out / "config.json").read_text())
        assert settings["dtype"] == settings["torch_dtype"] == str(expected).removeprefix("torch.")


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math", tie_word_embeddings=True)
    run_mix(config)
    assert json.loads((tmp_path / "mix" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_folder(tmp_path / "mix")


def test_attention_comes_from_every_model(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math", "code")
    run_mix(config)
    name = "model.layers.0.self_attn.q_proj.weight"
    mixed, seed, math, code = (load_folder(tmp_path / folder)[name] for folder in ("mix", "seed", "math", "code"))
    assert torch.equal(mixed, (math + code + seed) / 3)


def test_fresh_routers_are_not_saturated(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = make_models(tmp_path, "a", "b", "c", hidden_size=256, head_dim=64)
    run_mix(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mix", dtype=torch.float32)
    tokens = probe_tokens(SMALL["vocab_size"])

    def top() -> float:
        with torch.no_grad():
            logits = model(tokens, output_router_logits=True).router_logits
        return float(torch.cat(logits).softmax(-1).max(-1).values.mean())

    ours = top()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(0, 1)
    assert ours < 0.5 and top() > 0.8, "four experts; weights from N(0, 1) would decide before any training"


def test_a_seed_mixed_with_itself_keeps_its_logits_with_biases(tmp_path: Path) -> None:
    """Attention biases are kept."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {key: value for key, value in SMALL.items() if key != "head_dim"}
    model = Qwen2ForCausalLM(Qwen2Config(**settings, tie_word_embeddings=False, rope_theta=1e4))
    randomise(model, 3)
    model.save_pretrained(tmp_path / "seed")
    run_mix(
        MixConfig(
            seed=str(tmp_path / "seed"),
            experts={name: str(tmp_path / "seed") for name in "ab"},
            out=str(tmp_path / "mix"),
        )
    )
    tokens = probe_tokens(SMALL["vocab_size"])
    assert (hf_logits(tmp_path / "mix", tokens) - hf_logits(tmp_path / "seed", tokens)).abs().max() < 1e-4
