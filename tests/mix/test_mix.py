"""The BTX mix: its mathematics against transformers and a naive loop, independent of workers, dtypes and sources."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.mixing import SMALL, add_tokenizer, make_models, mix_arguments
from btx_testing.models import hf_logits, make_llama, probe_tokens
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.checkpoints.inspect import inspect_checkpoint
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FFN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "head_dim": 16, "num_key_value_heads": 4},
    ],
    ids=["plain", "tied", "llama3", "head_dim"],
)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_four_copies_of_a_seed_have_the_seeds_logits(tmp_path: Path, changes: dict, top_k: int) -> None:
    seed = make_llama(tmp_path / "seed", **{**SMALL, **changes})
    config = MixConfig(
        seed=str(seed), experts={name: str(seed) for name in "abc"}, out=str(tmp_path / "mix"), top_k=top_k
    )
    run_mix(config)
    tokens = probe_tokens(SMALL["vocab_size"])
    difference = (hf_logits(tmp_path / "mix", tokens) - hf_logits(seed, tokens)).abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("include_seed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_against_a_naive_loop(tmp_path: Path, include_seed: bool, dtype: torch.dtype) -> None:
    config = make_models(tmp_path, "math", "code", dtype=dtype)
    config = dataclasses.replace(config, options={"include_seed": include_seed})
    run_mix(config)
    members = [
        load_folder(tmp_path / name) for name in (["math", "code", "seed"] if include_seed else ["math", "code"])
    ]
    mixed = load_folder(tmp_path / "mix")
    for name, tensor in members[0].items():
        layer, _, part = name.partition(".mlp.")
        if part:
            short = next(w for w, long in FFN.items() if part.startswith(long))
            for e, member in enumerate(members):
                assert torch.equal(mixed.pop(f"{layer}.block_sparse_moe.experts.{e}.{short}.weight"), member[name])
            continue
        total = torch.zeros(tensor.shape)
        for member in members:
            total += member[name].float()
        assert torch.equal(mixed.pop(name), (total / len(members)).to(dtype)), name
    routers = [mixed.pop(f"model.layers.{i}.block_sparse_moe.gate.weight") for i in range(2)]
    assert not mixed, "nothing else is written"
    assert all(router.shape == (len(members), 32) and router.dtype == dtype for router in routers)
    assert not torch.equal(*routers) and 0.01 < torch.stack(routers).float().std() < 0.03


def test_bits_do_not_depend_on_workers_or_shards_but_on_the_seed(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math", "code")
    results = []
    for number, changes in enumerate(({"workers": 1}, {"workers": 6, "shard_size": 20_000}, {"rng_seed": 1})):
        out = tmp_path / f"mix{number}"
        run_mix(dataclasses.replace(config, out=str(out), **changes))  # type: ignore[arg-type]
        results.append(load_folder(out))
    assert same_bits(results[0], results[1])
    different = {name for name in results[0] if not torch.equal(results[0][name], results[2][name])}
    assert different == {f"model.layers.{i}.block_sparse_moe.gate.weight" for i in range(2)}


def test_the_result_says_what_it_is(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math", "code")
    (tmp_path / "seed" / "generation_config.json").write_text('{"eos_token_id": 7}')
    run_mix(config)
    settings = json.loads((tmp_path / "mix" / "config.json").read_text())
    assert settings["architectures"] == ["MixtralForCausalLM"] and settings["router_jitter_noise"] == 0
    assert (settings["num_local_experts"], settings["num_experts_per_tok"]) == (3, 2)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "mix" / name).read_bytes() == (tmp_path / "seed" / name).read_bytes()
    facts = inspect_checkpoint(tmp_path / "mix")
    experts = facts["moe"]["experts"]
    assert [expert["name"] for expert in experts] == ["math", "code", "generalist"]
    assert [Path(expert["origin"]).name for expert in experts] == ["math", "code", "seed"]
    tensors = load_folder(tmp_path / "mix")
    total = sum(tensor.numel() for tensor in tensors.values())
    expert = sum(tensor.numel() for name, tensor in tensors.items() if ".experts.0." in name)
    assert facts["parameters"] == {"total": total, "active": total - expert}


def test_a_megatron_result_is_the_hugging_face_one_imported(tmp_path: Path) -> None:
    from btx_nemo.checkpoints.torch_dist import DistReader

    config = make_models(tmp_path, "math", "code")
    (tmp_path / "seed" / "chat_template.jinja").write_text("{{ messages }}")
    run_mix(config)
    run_mix(dataclasses.replace(config, format="megatron", out=str(tmp_path / "direct"), workers=3))
    import_hf(tmp_path / "mix", tmp_path / "imported")
    readers = [DistReader(tmp_path / name) for name in ("direct", "imported")]
    tensors = [{name: reader.read(name) for name in reader.layout()} for reader in readers]
    assert same_bits(*tensors)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "direct/tokenizer" / name).read_bytes() == (tmp_path / "seed" / name).read_bytes()
    assert inspect_checkpoint(tmp_path / "direct")["moe"]["experts"][0]["name"] == "math"
    run_mix(dataclasses.replace(config, seed=str(tmp_path / "seed"), out=str(tmp_path / "sharded"), shard_size=20_000))
    assert (tmp_path / "sharded" / "chat_template.jinja").read_text() == "{{ messages }}"
    sizes = [path.stat().st_size for path in (tmp_path / "sharded").glob("model-*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 20_000 + 8192, "tensors, and a header of whole pages"


def test_a_dtype_is_what_is_on_disk(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math")
    run_mix(dataclasses.replace(config, dtype="bfloat16"))
    mixed, seed, math = (load_folder(tmp_path / name) for name in ("mix", "seed", "math"))
    assert {tensor.dtype for tensor in mixed.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "mix" / "config.json").read_text())["dtype"] == "bfloat16"
    name = "model.norm.weight"
    assert torch.equal(mixed[name], ((math[name] + seed[name]) / 2).bfloat16())


def test_megatron_checkpoints_mix_like_the_folders_they_came_from(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math", "code")
    run_mix(config)
    import_hf(tmp_path / "math", tmp_path / "run" / "checkpoints" / "step_00000001")
    (tmp_path / "run" / "latest").write_text("step_00000001\n")
    import_hf(tmp_path / "seed", tmp_path / "seed_megatron")
    out = str(tmp_path / "mix2")
    experts = {**config.experts, "math": str(tmp_path / "run")}
    run_mix(dataclasses.replace(config, seed=str(tmp_path / "seed_megatron"), experts=experts, out=out))
    assert same_bits(load_folder(tmp_path / "mix"), load_folder(tmp_path / "mix2"))
    settings = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("mix", "mix2")]
    assert settings[0] == settings[1]


@pytest.mark.parametrize("kind", ["folder", "run"])
def test_a_dry_run_reads_no_tensor_and_writes_nothing(tmp_path: Path, commands: CommandServer, kind: str) -> None:
    config = make_models(tmp_path, "math", "code")
    if kind == "run":
        import_hf(tmp_path / "math", tmp_path / "run" / "checkpoints" / "step_00000001")
        (tmp_path / "run" / "latest").write_text("step_00000001\n")
        config = dataclasses.replace(config, experts={**config.experts, "math": str(tmp_path / "run")})
    before = sorted(tmp_path.rglob("*"))
    forbidden = "btx_testing.mixing:forbid_reading"
    ended = commands.run(*mix_arguments(config), "--dry-run", before=forbidden)
    assert (ended.code, ended.err) == (0, "")
    assert sorted(tmp_path.rglob("*")) == before
    lines = ended.out.splitlines()
    assert (
        "model.layers.1.block_sparse_moe.experts.2.w3.weight  [48, 32] float32  6.0 KiB  "
        "= seed:model.layers.1.mlp.up_proj.weight"
    ) in lines
    norm = "model.norm.weight" if kind == "folder" else "decoder.final_layernorm.weight"
    assert f"mean(math:{norm}, code:model.norm.weight, seed:model.norm.weight)" in ended.out
    assert "normal(std=0.02)" in ended.out and "peak memory at most" in ended.out
    ended = commands.run(*mix_arguments(config), before=forbidden)
    assert ended.code == 1 and "AssertionError: a tensor is read" in ended.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tied_model_with_an_equal_lm_head_is_accepted(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = make_models(tmp_path, "math", tie_word_embeddings=True)
    tensors = load_folder(tmp_path / "math")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
              tmp_path / "math" / "model.safetensors")  # fmt: skip
    run_mix(config)
    assert "lm_head.weight" not in load_folder(tmp_path / "mix")
    manifest = json.loads((tmp_path / "mix" / "manifest.json").read_text())
    assert manifest["dropped"] == {"math:lm_head.weight": "tied: the embedding is the output layer"}


def test_tokenizers_are_compared_by_content(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math")
    shutil.copy(tmp_path / "seed" / "tokenizer.json", tmp_path / "math" / "tokenizer.json")
    add_tokenizer(tmp_path / "math")
    text = (tmp_path / "math" / "tokenizer.json").read_text()
    (tmp_path / "math" / "tokenizer.json").write_text(json.dumps(json.loads(text), indent=3))
    run_mix(config)
