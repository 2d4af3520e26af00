"""A copy of the seed, a frozen feed-forward and a stranger are told from a specialist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from btx_testing.mixing import make_models
from btx_testing.tensors import load_folder
from safetensors.torch import save_file

from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.families.source import open_source
from btx_nemo.mix.distance import distances
from btx_nemo.mix.run import run_mix


def move(root: Path, name: str, by: float, keep: str = "nothing") -> None:
    """Makes a model the seed plus noise of that relative size, but for tensors whose name holds `keep`."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_folder(root / "seed")
    for tensor_name, tensor in tensors.items():
        if keep not in tensor_name:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor += by * noise * tensor.norm() / noise.norm()
    save_file(tensors, root / name / "model.safetensors")


@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_the_distance_is_the_relative_one(tmp_path: Path, kind: str) -> None:
    make_models(tmp_path, "math")
    move(tmp_path, "math", 0.05)
    folder = tmp_path / "math"
    if kind == "megatron":
        import_hf(folder, tmp_path / "imported")
        folder = tmp_path / "imported"
    found = distances(open_source(tmp_path / "seed", "seed"), open_source(folder, "math"))
    assert len(found) == 2 and all(0.04 < value < 0.06 for layer in found for value in layer)


def test_warnings_are_for_what_is_seldom_meant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_models(tmp_path, "math", "code", "law", "copy")
    move(tmp_path, "math", 0.05)
    move(tmp_path, "code", 0.05, keep=".mlp.")
    experts = {**config.experts, "copy": config.seed}
    run_mix(dataclasses.replace(config, experts=experts))
    warnings = [record.message for record in caplog.records]
    assert [re.sub(r"1\.\d\d", "1.xx", message) for message in warnings] == [
        f"{tmp_path}/code: expert code has the seed's feed-forward blocks; were they frozen?",
        f"{tmp_path}/law: expert law is 1.xx times the seed's size away from it in layer "
        f"{warnings[1].split('layer ')[1][0]}; did it start from {tmp_path}/seed?",
        f"{tmp_path}/seed: expert copy looks bit-equal to the seed; was it trained?",
    ]
    lines = [line for line in capsys.readouterr().out.splitlines() if "relative distance" in line]
    assert [line.split(":")[0] for line in lines] == ["math", "code", "law", "copy"]
    assert re.fullmatch(r"math: relative distance from the seed, layer by layer: 0\.0\d+ 0\.0\d+", lines[0])
    assert lines[3].endswith(" 0 0")
