"""Law 3: import then export is bit-identical, for every shape of model; and neither leaves anything half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from btx_testing.mixing import SMALL, add_tokenizer
from btx_testing.models import hf_logits, make_llama, make_mixtral, probe_tokens
from btx_testing.tensors import load_folder, same_bits, temporaries

from btx_nemo.checkpoints import atomic
from btx_nemo.checkpoints.torch_dist import DistReader
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.errors import UserError
from btx_nemo.families.architecture import read_config
from btx_nemo.families.source import find_checkpoint, read_model_json

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one group": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "head_dim": {"head_dim": 24},
    "llama3": {"rope_parameters": LLAMA3},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_export_of_import_is_the_same_bits(tmp_path: Path, kind: str, shape: str) -> None:
    make = make_llama if kind == "dense" else make_mixtral
    src = make(tmp_path / "src", **{**SMALL, **SHAPES[shape]})
    add_tokenizer(src)
    import_hf(src, tmp_path / "ckpt", workers=2)
    export_hf(tmp_path / "ckpt", tmp_path / "back", shard_size=40_000, workers=3)
    assert same_bits(load_folder(src), load_folder(tmp_path / "back"))
    assert read_config(src) == read_config(tmp_path / "back") == read_model_json(tmp_path / "ckpt")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (src / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    tokens = probe_tokens(SMALL["vocab_size"])
    assert torch.equal(hf_logits(src, tokens), hf_logits(tmp_path / "back", tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_kept_or_cast_as_asked(tmp_path: Path, dtype: torch.dtype) -> None:
    src = make_llama(tmp_path / "src", dtype=dtype, **SMALL)
    import_hf(src, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    export_hf(tmp_path / "ckpt", tmp_path / "wide", dtype="float32")
    assert same_bits(load_folder(src), load_folder(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == str(dtype)[6:]
    wide = {name: tensor.float() for name, tensor in load_folder(src).items()}
    assert same_bits(wide, load_folder(tmp_path / "wide"))
    with pytest.raises(UserError, match="dtype=float99: unknown"):
        export_hf(tmp_path / "ckpt", tmp_path / "x", dtype="float99")


def test_token_ids_come_along(tmp_path: Path) -> None:
    src = make_llama(tmp_path / "src", eos_token_id=[5, 6], bos_token_id=4, **SMALL)
    import_hf(src, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (settings["eos_token_id"], settings["bos_token_id"]) == ([5, 6], 4)
    (tmp_path / "ckpt" / "tokenizer" / "config.json").unlink(missing_ok=True)


def test_a_run_directory_is_followed_to_its_latest(tmp_path: Path) -> None:
    src = make_llama(tmp_path / "src", **SMALL)
    run = tmp_path / "run"
    import_hf(src, run / "checkpoints" / "step_00000007")
    with pytest.raises(UserError, match="without a finished checkpoint"):
        export_hf(run, tmp_path / "back")
    (run / "latest").write_text("step_00000007\n")
    assert find_checkpoint(run) == run / "checkpoints" / "step_00000007"
    export_hf(run, tmp_path / "back")
    assert same_bits(load_folder(src), load_folder(tmp_path / "back"))
    for name in ("../checkpoints", "step_00000008", ""):
        (run / "latest").write_text(name)
        with pytest.raises(UserError, match="latest"):
            find_checkpoint(run)


def test_an_import_reads_each_byte_once_and_an_export_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = make_mixtral(tmp_path / "src", **SMALL)
    import_hf(src, tmp_path / "ckpt")
    read = []
    original = DistReader.read_into

    def counting(self: DistReader, name: str, box: tuple, out: torch.Tensor) -> None:
        read.append(out.nbytes)
        original(self, name, box, out)

    monkeypatch.setattr(DistReader, "read_into", counting)
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    assert sum(read) == sum(tensor.nbytes for tensor in load_folder(src).values())


@pytest.mark.parametrize("which", ["import", "export"])
def test_what_goes_wrong_leaves_nothing(tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    src = make_llama(tmp_path / "src", **SMALL)
    import_hf(src, tmp_path / "ckpt")
    run, given = (import_hf, src) if which == "import" else (export_hf, tmp_path / "ckpt")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there: already exists"):
        run(given, tmp_path / "there")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        run(tmp_path / "nowhere", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "free_bytes", lambda path: 10_000)
        with pytest.raises(UserError, match="the result needs up to"):
            run(given, tmp_path / "out")
    wrong = tmp_path / "ckpt" if which == "import" else src
    with pytest.raises(UserError, match=r"already; (im|ex)port takes"):
        run(wrong, tmp_path / "out")
    data = max(given.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(UserError, match=data.name):
        run(given, tmp_path / "out")
    assert not (tmp_path / "out").exists() and temporaries(tmp_path) == []


def test_a_non_finite_weight_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    from btx_nemo.checkpoints.manifest import read_manifest, write_manifest

    src = make_llama(tmp_path / "src", **SMALL)
    import_hf(src, tmp_path / "ckpt")
    value = load_folder(src)["model.norm.weight"]
    for data in (tmp_path / "ckpt").glob("*.distcp"):
        content = data.read_bytes()
        raw = value.numpy().tobytes()
        if raw in content:
            data.write_bytes(content.replace(raw, raw[:40] + b"\x00\x00\x80\x7f" + raw[44:]))
    read_manifest(tmp_path / "ckpt")
    write_manifest(tmp_path / "ckpt", kind="import")
    with pytest.raises(UserError, match=r"distcp: tensor 'decoder.final_layernorm.weight' .*inf.*\[10\]"):
        export_hf(tmp_path / "ckpt", tmp_path / "back")
    assert not (tmp_path / "back").exists()
