"""The llama table: settings both ways, layouts against a naive loop, and what it cannot hold is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from btx_testing.tensors import MemoryReader

from btx_nemo.errors import UserError
from btx_nemo.families.architecture import read_config
from btx_nemo.families.base import from_megatron, get_family, layout, to_megatron
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.families.target import choose_target
from btx_nemo.plan.execute import evaluate
from btx_nemo.plan.expr import infer

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def model(**changes: object) -> ModelConfig:
    values = dict(
        num_layers=2, hidden_size=18, ffn_hidden_size=24, num_attention_heads=6, num_query_groups=2, head_dim=4,
        vocab_size=50, norm_eps=1e-6, rope_theta=777.0,
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def hf_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    return {name: torch.randn(info.shape) for name, info in layout(config, "float32").items()}


def hf_config(config: ModelConfig, dtype: str, base: dict | None = None) -> dict:
    return choose_target(config, base or {}, "test").architecture.write(config, dtype, base or {})


def in_megatron(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    reader = MemoryReader(tensors)
    table = to_megatron(config)
    return {
        key: evaluate(expr, {"hf": reader}, infer(expr, {"hf": reader.layout()}), key, 0) for key, expr in table.items()
    }


@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=3)], ids=["dense", "moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back_is_the_same_bits(moe: MoEConfig | None, tied: bool) -> None:
    config = model(moe=moe, tie_word_embeddings=tied)
    tensors = hf_tensors(config)
    assert ("lm_head.weight" in tensors) == (not tied)
    reader = MemoryReader(in_megatron(config, tensors))
    table = from_megatron(config)
    assert list(table) == list(tensors)
    for name, expr in table.items():
        info = infer(expr, {"ckpt": reader.layout()})
        assert torch.equal(evaluate(expr, {"ckpt": reader}, info, name, 0), tensors[name]), name


def test_layouts_against_a_naive_loop() -> None:
    config = model(moe=MoEConfig(num_experts=3))
    hf = hf_tensors(config)
    mcore = in_megatron(config, hf)
    assert mcore["embedding.word_embeddings.weight"].shape == (50, 18)
    for layer in range(2):
        p = f"model.layers.{layer}."
        q, k, v = (hf[f"{p}self_attn.{x}_proj.weight"] for x in "qkv")
        rows = []
        for group in range(2):
            for head in range(3):
                rows += [q[(group * 3 + head) * 4 + i] for i in range(4)]
            rows += [k[group * 4 + i] for i in range(4)]
            rows += [v[group * 4 + i] for i in range(4)]
        decoder = f"decoder.layers.{layer}."
        assert torch.equal(mcore[decoder + "self_attention.linear_qkv.weight"], torch.stack(rows))
        fc1 = mcore[decoder + "mlp.experts.experts.linear_fc1.weight"]
        fc2 = mcore[decoder + "mlp.experts.experts.linear_fc2.weight"]
        for e in range(3):
            m = f"{p}mlp.experts.{e}."
            assert torch.equal(fc1[e, :24], hf[m + "gate_proj.weight"]) and torch.equal(
                fc1[e, 24:], hf[m + "up_proj.weight"]
            )
            assert torch.equal(fc2[e], hf[m + "down_proj.weight"])
        assert torch.equal(mcore[decoder + "mlp.router.weight"], hf[p + "mlp.gate.weight"])
        assert torch.equal(mcore[decoder + "pre_mlp_layernorm.weight"], hf[p + "post_attention_layernorm.weight"])


@pytest.mark.parametrize(
    "config",
    [
        model(),
        model(rope_scaling=LLAMA3, tie_word_embeddings=True, max_position_embeddings=999),
        model(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        model(moe=MoEConfig(num_experts=5, top_k=3, experts=["a", "b", "c", "d", "generalist"])),
    ],
    ids=["plain", "llama3", "linear", "moe"],
)
def test_settings_there_and_back(tmp_path: Path, config: ModelConfig) -> None:
    table = hf_config(config, "bfloat16", {"eos_token_id": [3, 4], "bos_token_id": None})
    assert table["eos_token_id"] == [3, 4] and table["torch_dtype"] == table["dtype"] == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert read_config(tmp_path) == config
    for spelling in (("rope_theta", "rope_scaling"), ("rope_parameters",)):
        part = {key: value for key, value in table.items() if not key.startswith("rope") or key in spelling}
        (tmp_path / "config.json").write_text(json.dumps(part))
        assert read_config(tmp_path) == config


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=5, top_k=3)], ids=["dense", "moe"])
def test_transformers_understands_our_settings(tmp_path: Path, scaling: dict | None, moe: MoEConfig | None) -> None:
    from transformers import AutoConfig

    config = model(rope_scaling=scaling, moe=moe, tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config, "float16")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == config
    assert theirs.head_dim == 4 and theirs.rms_norm_eps == 1e-6 and theirs.tie_word_embeddings
    if moe:
        assert (theirs.num_local_experts, theirs.num_experts_per_tok, theirs.sliding_window) == (5, 3, None)


def test_silence_means_what_transformers_assumes(tmp_path: Path) -> None:
    from transformers import LlamaConfig, MistralConfig, MixtralConfig

    needed = {k: v for k, v in BASE.items() if k not in ("model_type", "num_key_value_heads", "num_attention_heads")}
    for kind, cls in (("llama", LlamaConfig), ("mistral", MistralConfig), ("mixtral", MixtralConfig)):
        given = {**needed, "num_attention_heads": 16, "model_type": kind, "sliding_window": None}
        (tmp_path / "config.json").write_text(json.dumps(given))
        mine, theirs = read_config(tmp_path), cls(**{k: v for k, v in given.items() if k != "model_type"})
        assert mine.norm_eps == theirs.rms_norm_eps
        assert mine.max_position_embeddings == theirs.max_position_embeddings
        assert mine.num_query_groups == theirs.num_key_value_heads


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True is not supported by mistral"),
        ({"attention_bias": "yes"}, "attention_bias='yes' must be true or false"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "gpt2"}, "model_type 'gpt2'.*known: .*llama, mistral, mixtral"),
        ({"sliding_window": 1000}, "sliding_window=1000 is ignored by this architecture"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window=-1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 6.0}}, "rope_theta=5.0"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "make them agree"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers|num_layers"),
        ({"num_hidden_layers": 10**9}, "num_layers=1000000000"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "num_experts=1000000000"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "top_k=3"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "yarn"),
        ({"head_dim": None}, "num_attention_heads=6 does not divide hidden_size=16"),
        ({"num_key_value_heads": 4}, "num_query_groups=4"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "config.json: tie_word_embeddings='no' must be true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None must be true or false"),
        ({"rope_theta": None}, "config.json: rope_theta=None must be a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta=None must be"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be a positive number"),
        (
            {"rope_theta": float("nan"), "rope_parameters": {"rope_theta": float("nan")}},
            "rope_theta=nan must be a positive number",
        ),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value)),
)
def test_what_cannot_be_held_is_refused_by_name(tmp_path: Path, change: dict, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **change}))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown family 'x'; known: llama, olmo2, .*qwen3"):
        get_family("x")
