"""Every family there and back, from one process and from a live model at any layout: the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from btx_testing import law_jobs
from btx_testing.models import FAMILIES, MIXTURES, hf_logits, make_model, probe_tokens
from btx_testing.pool import RankPool
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.families.architecture import read_config
from btx_nemo.families.source import read_model_json


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in (*FAMILIES, *MIXTURES)),
        *((name, torch.bfloat16) for name in ("olmo3-yarn", "qwen3_moe", "qwen2_moe-shared")),
    ],
)
def test_there_and_back_is_the_same_bits(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    src = make_model(tmp_path / "src", name, seed=4, dtype=dtype)
    import_hf(src, tmp_path / "ckpt", workers=2)
    export_hf(tmp_path / "ckpt", tmp_path / "back", shard_size=300_000, workers=2)
    original, back = load_folder(src), load_folder(tmp_path / "back")
    if name == "qwen2_moe":  # its shared expert has width zero, and a gate that multiplies nothing
        assert original.keys() == back.keys()
        original, back = ({k: t for k, t in each.items() if "expert_gate" not in k} for each in (original, back))
    assert same_bits(original, back)
    assert read_config(src) == read_config(tmp_path / "back") == read_model_json(tmp_path / "ckpt")
    types = [json.loads((folder / "config.json").read_text())["model_type"] for folder in (src, tmp_path / "back")]
    assert types[0] == types[1]
    if dtype == torch.float32:
        assert torch.equal(hf_logits(src, probe_tokens()), hf_logits(tmp_path / "back", probe_tokens()))


@pytest.mark.parametrize(
    ("name", "layout", "count"),
    [
        ("mixtral", {"ep": 4}, 4),
        ("mixtral", {"tp": 2}, 2),
        ("mixtral", {"pp": 2}, 2),
        ("qwen2_moe-shared", {"tp": 2, "pp": 2, "ep": 2}, 4),
        ("qwen3_moe", {"pp": 2, "ep": 2}, 4),
        ("flex_olmo", {"tp": 2, "ep": 2}, 2),
    ],
    ids=str,
)
def test_every_expert_s_bits_are_those_of_one_process(
    ranks: RankPool, tmp_path: Path, name: str, layout: dict[str, int], count: int
) -> None:
    """What Megatron's own writer saved of a live model at a layout, exported: each tensor as it was imported."""
    src = make_model(tmp_path / "src", name, seed=5)
    ranks.run(law_jobs.megatron_saves, str(src), str(tmp_path / "ckpt"), layout, "fp32", ranks=count)
    export_hf(tmp_path / "ckpt", tmp_path / "back", workers=2)
    assert same_bits(load_folder(src), load_folder(tmp_path / "back"))


@pytest.mark.parametrize("name", ["llama-bias", "qwen3", "olmo2", "olmo3-yarn"])
def test_a_dense_model_saved_at_a_layout_is_the_same_bits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    src = make_model(tmp_path / "src", name, seed=6)
    layout = {"tp": 2, "pp": 2}
    ranks.run(law_jobs.megatron_saves, str(src), str(tmp_path / "ckpt"), layout, "fp32", ranks=4)
    export_hf(tmp_path / "ckpt", tmp_path / "back", workers=2)
    assert same_bits(load_folder(src), load_folder(tmp_path / "back"))
