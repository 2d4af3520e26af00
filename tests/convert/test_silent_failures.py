"""What other tools do wrong without a word, as users report it: each ends in exit 2 here, or in the right result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.mixing import SMALL, add_tokenizer
from btx_testing.models import hf_logits, make_model, probe_tokens
from btx_testing.tensors import load_folder
from safetensors.torch import save_file

MODEL = "model.safetensors"


def edit(folder: Path, **changes: object) -> None:
    """Change settings of config.json; None removes them."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_folder(folder)
    change(tensors)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})


def drop(folder: Path, name: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(name))


def lose_a_shard(folder: Path) -> None:
    tensors = load_folder(folder)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / MODEL).unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()


def not_finite(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].__setitem__(3, float("nan")))


NORM = "model.layers.1.post_attention_layernorm.weight"
IMPORTS = {
    "a router is missing": ("qwen3_moe", lambda f: drop(f, "model.layers.0.mlp.gate.weight"), "mlp.gate.weight"),
    "the output layer is missing": ("qwen2", lambda f: drop(f, "lm_head.weight"), "lm_head.weight"),
    "a norm is missing": ("olmo2", lambda f: drop(f, NORM), NORM),
    "an expert is missing": (
        "mixtral", lambda f: drop(f, "model.layers.1.block_sparse_moe.experts.3.w2.weight"), "experts.3.w2.weight"
    ),
    "biases are not in the settings": ("llama-bias", lambda f: edit(f, attention_bias=False), "_proj.bias"),
    "biases are not in the architecture": (
        "llama-bias", lambda f: edit(f, model_type="mistral"), "attention_bias=True is not supported by mistral"
    ),
    "norms of q and k are not in the architecture": ("qwen3", lambda f: edit(f, model_type="llama"), "_norm.weight"),
    "a shard is missing": ("qwen2", lose_a_shard, "model-00002-of-00002.safetensors: missing shard"),
    "an architecture that is not known": ("qwen2", lambda f: edit(f, model_type="gpt2"), "model_type 'gpt2'"),
    "a value is not finite": ("qwen2", not_finite, "'model.norm.weight'"),
    "rope is said twice, differently": ("qwen3", lambda f: edit(f, rope_theta=5.0), "rope_theta=5.0 but"),
    "rope that versions read differently": (
        "olmo3", lambda f: edit(f, rope_parameters=None, rope_theta=1234.0), "is read differently by transformers"
    ),
    "a scaling that is not known": (
        "qwen2", lambda f: edit(f, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "'longrope'"
    ),
    "clipped queries": ("olmoe", lambda f: edit(f, clip_qkv=8.0), "clip_qkv=8.0"),
    "windows without layers": (
        "qwen2_moe", lambda f: edit(f, use_sliding_window=True, sliding_window=4, layer_types=None), "layer_types"
    ),
    "quantized weights": ("qwen2", lambda f: edit(f, quantization_config={"bits": 4}), "quantized"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPORTS)
def test_an_import_that_would_be_wrong_is_refused(commands: CommandServer, tmp_path: Path, case: str) -> None:
    name, spoil, message = IMPORTS[case]
    folder = make_model(tmp_path / "hf", name, **SMALL)
    spoil(folder)
    ended = commands.run("import", f"in={folder}", f"out={tmp_path / 'ckpt'}", "verify=false")
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1, ended.err
    assert not (tmp_path / "ckpt").exists()


def rope(folder: Path) -> None:
    edit(folder, rope_parameters={"rope_type": "default", "rope_theta": 77.0}, rope_theta=77.0)


def deeper(folder: Path) -> None:
    make_model(folder, "qwen2", **{**SMALL, "num_hidden_layers": 3})


MIXES = {
    "another rope theta": (rope, "rope_theta=77.0 but the seed"),
    "a larger vocabulary": (lambda f: make_model(f, "qwen2", **{**SMALL, "vocab_size": 112}), "vocab_size=112 but"),
    "a deeper specialist": (deeper, "num_hidden_layers=3 but the seed"),
    "another dtype": (lambda f: make_model(f, "qwen2", dtype=torch.bfloat16, **SMALL), "is bfloat16 but the seed's"),
    "another numbering of tokens": (lambda f: add_tokenizer(f, w5=6, w6=5), "token 'w5' is id 6 but id 5"),
    "another epsilon": (lambda f: edit(f, rms_norm_eps=0.1), "rms_norm_eps=0.1 but the seed"),
    "a window": (
        lambda f: edit(f, use_sliding_window=True, sliding_window=5, max_window_layers=0, layer_types=None),
        "sliding_window=5 but the seed",
    ),
    "not finite": (not_finite, "'model.norm.weight'"),
}


@pytest.mark.parametrize("case", MIXES)
def test_a_mix_that_would_be_wrong_is_refused(commands: CommandServer, tmp_path: Path, case: str) -> None:
    spoil, message = MIXES[case]
    for seed, name in enumerate(("seed", "math")):
        add_tokenizer(make_model(tmp_path / name, "qwen2", seed=seed, **SMALL))
    spoil(tmp_path / "math")
    folders = (f"seed={tmp_path / 'seed'}", f"experts.math={tmp_path / 'math'}", f"out={tmp_path / 'mix'}")
    ended = commands.run("mix", "--config-name", "btx", *folders)
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1, ended.err
    assert not (tmp_path / "mix").exists()


def test_a_token_beyond_the_embedding_is_named(commands: CommandServer, tmp_path: Path) -> None:
    for name in ("seed", "math"):
        add_tokenizer(make_model(tmp_path / name, "qwen3", **SMALL), words=97)
    folders = (f"seed={tmp_path / 'seed'}", f"experts.math={tmp_path / 'math'}", f"out={tmp_path / 'mix'}")
    ended = commands.run("mix", "--config-name", "btx", *folders)
    assert ended.code == 2 and "has id 96 but the embedding has 96 rows" in ended.err


def test_tied_embeddings_stay_tied_and_the_dtype_is_that_on_disk(commands: CommandServer, tmp_path: Path) -> None:
    src = make_model(tmp_path / "src", "qwen3", **SMALL)
    edit_tensors(src, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert commands.run("import", f"in={src}", f"out={tmp_path / 'ckpt'}").code == 0
    ended = commands.run("export", f"in={tmp_path / 'ckpt'}", f"out={tmp_path / 'hf'}", "dtype=bfloat16")
    assert ended.code == 0, ended.err
    tensors = load_folder(tmp_path / "hf")
    assert "lm_head.weight" not in tensors and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["dtype"] == config["torch_dtype"] == "bfloat16"
    edit_tensors(src, lambda tensors: tensors["lm_head.weight"].add_(1.0))
    ended = commands.run("import", f"in={src}", f"out={tmp_path / 'other'}")
    assert ended.code == 2 and "differs from the embedding although config.json says tie_word_embeddings" in ended.err


@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "flex_olmo", "olmoe"])
def test_what_the_gates_sum_to_is_always_stated(tmp_path: Path, name: str, renormalises: bool) -> None:
    """transformers' default is the other rule, and a wrong one only makes a model worse."""
    from btx_nemo.convert.to_hf import export_hf
    from btx_nemo.convert.to_megatron import import_hf

    src = make_model(tmp_path / "src", name, norm_topk_prob=renormalises, **SMALL)
    import_hf(src, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["norm_topk_prob"] is renormalises
    tokens = probe_tokens(96)
    assert torch.equal(hf_logits(src, tokens), hf_logits(tmp_path / "back", tokens))
    other = make_model(tmp_path / "other", name, norm_topk_prob=not renormalises, **SMALL)
    assert not torch.allclose(hf_logits(src, tokens), hf_logits(other, tokens), atol=1e-4)


def test_a_router_s_bias_is_not_lost(commands: CommandServer, tmp_path: Path) -> None:
    src = make_model(tmp_path / "src", "flex_olmo", **SMALL)
    assert commands.run("import", f"in={src}", f"out={tmp_path / 'ckpt'}").code == 0
    settings = json.loads((tmp_path / "ckpt" / "model.json").read_text())
    settings["moe"] |= {"router": "flexolmo", "options": {"bias": True}}
    (tmp_path / "ckpt" / "model.json").write_text(json.dumps(settings))
    for more in ((), ("allow_inexact=true",)):
        ended = commands.run("export", f"in={tmp_path / 'ckpt'}", f"out={tmp_path / 'hf'}", "target=flex_olmo", *more)
        assert ended.code == 2 and "with penalty, a bias on logits that no weight can hold" in ended.err


def test_what_lies_beside_the_weights_is_carried(commands: CommandServer, tmp_path: Path) -> None:
    src = make_model(tmp_path / "src", "qwen3", eos_token_id=[5, 6], bos_token_id=4, **SMALL)
    add_tokenizer(src)
    files = {
        "generation_config.json": '{"temperature": 0.6, "eos_token_id": [5, 6]}',
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": '{"eos_token": "w2"}',
        "added_tokens.json": "{}",
    }
    for name, content in files.items():
        (src / name).write_text(content)
    assert commands.run("import", f"in={src}", f"out={tmp_path / 'ckpt'}").code == 0
    assert commands.run("export", f"in={tmp_path / 'ckpt'}", f"out={tmp_path / 'hf'}").code == 0
    for name in (*files, "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (src / name).read_bytes(), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == ([5, 6], 4)
