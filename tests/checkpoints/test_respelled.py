"""Megatron's other spellings of a checkpoint's keys, written by Megatron itself: the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from btx_testing import law_jobs
from btx_testing.models import make_model
from btx_testing.pool import RankPool
from btx_testing.tensors import MemoryReader, load_folder, same_bits

from btx_nemo.checkpoints.respelled import respelled
from btx_nemo.checkpoints.torch_dist import DistReader
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.errors import UserError

SPELLINGS = {
    "a key an expert": {"singleton_local_shards": True},
    "an axis over layers": {"non_homogeneous_layers": False},
}


@pytest.mark.parametrize(
    ("name", "spelling", "layout"),
    [
        ("mixtral", "a key an expert", {"ep": 4}),
        ("mixtral", "a key an expert", {"tp": 2, "pp": 2, "ep": 2}),
        ("qwen3", "a key an expert", {"tp": 2, "pp": 2}),
        ("qwen3", "an axis over layers", {"tp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_every_spelling_is_exported_as_the_same_bits(
    ranks: RankPool, tmp_path: Path, name: str, spelling: str, layout: dict[str, int]
) -> None:
    src = make_model(tmp_path / "src", name, seed=8)
    ranks.run(law_jobs.megatron_saves, str(src), str(tmp_path / "ckpt"), layout, "fp32", SPELLINGS[spelling], ranks=4)
    stored = DistReader(tmp_path / "ckpt").layout()
    if (
        "layers" in spelling
    ):  # only of a dense model: a list of the layers that are mixtures makes Megatron tell them apart
        assert "decoder.layers.self_attention.linear_qkv.weight" in stored
    if "expert" in spelling and name == "mixtral":
        assert any(key.endswith("experts.experts.3.linear_fc1.weight_w") for key in stored)
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    assert same_bits(load_folder(src), load_folder(tmp_path / "back"))


def test_parts_are_read_alone() -> None:
    tensors = {
        f"decoder.layers.mlp.experts.experts.{e}.linear_fc1.weight_{half}": torch.randn(3, 4, 5)
        for e in range(3)
        for half in "wv"
    } | {"output_layer.weight": torch.randn(6, 5)}
    memory = MemoryReader(tensors)
    reader = respelled(memory)
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    assert reader.layout()[key].shape == (3, 8, 5) and len(reader.layout()) == 4
    part = reader.read(key, [slice(1, 3), slice(2, 7), slice(1, 4)])
    stacked = "decoder.layers.mlp.experts.experts.{}.linear_fc1.weight_{}"
    whole = torch.stack([torch.cat([tensors[stacked.format(e, half)][1] for half in "wv"]) for e in range(3)])
    assert torch.equal(part, whole[1:3, 2:7, 1:4]) and memory.elements_read == part.numel()
    assert respelled(MemoryReader({"a": torch.ones(1)})).layout().keys() == {"a"}


def test_a_missing_expert_is_named() -> None:
    key = "decoder.layers.0.mlp.experts.experts.{}.linear_fc2.weight"
    with pytest.raises(UserError, match="of expert 1 is missing, although there are 2"):
        respelled(MemoryReader({key.format(e): torch.ones(2, 2) for e in (0, 2)}))
