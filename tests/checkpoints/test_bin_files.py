"""pytorch_model.bin: read only when asked, as weights alone, and the same bits as safetensors."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.mixing import make_models
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.checkpoints.bin_files import INDEX, SINGLE, BinReader
from btx_nemo.errors import UserError
from btx_nemo.mix.run import run_mix


def to_bin(folder: Path, shards: int = 1) -> None:
    """The folder's weights as an old transformers saved them."""
    tensors = load_folder(folder)
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / SINGLE)
        return
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        torch.save({name: tensors[name] for name in names[number::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[number::shards], file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_mix_of_bins_equals_that_of_safetensors(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math", "code")
    run_mix(config)
    to_bin(tmp_path / "math")
    to_bin(tmp_path / "code", shards=3)
    config = dataclasses.replace(config, out=str(tmp_path / "mix2"))
    with pytest.raises(UserError, match=r"math: no safetensors, and pytorch_model\.bin is a pickle; .*allow_bin=true"):
        run_mix(config)
    run_mix(dataclasses.replace(config, allow_bin=True))
    assert same_bits(load_folder(tmp_path / "mix"), load_folder(tmp_path / "mix2"))


def test_the_import_reads_a_bin_when_asked(tmp_path: Path, commands: CommandServer) -> None:
    make_models(tmp_path)
    to_bin(tmp_path / "seed")
    ended = commands.run("import", f"in={tmp_path}/seed", f"out={tmp_path}/a")
    assert ended.code == 2 and "allow_bin=true" in ended.err
    assert commands.run("import", f"in={tmp_path}/seed", f"out={tmp_path}/a", "allow_bin=yes").code == 2
    assert commands.run("import", f"in={tmp_path}/seed", f"out={tmp_path}/a", "allow_bin=true").code == 0
    assert (tmp_path / "a" / "manifest.json").exists()


class Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def test_nothing_in_a_bin_is_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "x": Exploit(tmp_path / "ran")}, tmp_path / SINGLE)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: cannot be read as weights alone"):
        BinReader(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / SINGLE

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message) as error:
            BinReader(tmp_path)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)

    for content in (b"", b"nonsense", b"\x80\x05"):
        path.write_bytes(content)
        refused("cannot be read as weights")
    torch.save({"w": torch.ones(100)}, path)
    os.truncate(path, path.stat().st_size - 20)
    refused("cannot be read as weights")
    torch.save([torch.ones(3)], path)
    refused("no table of tensors")
    torch.save({"w": torch.ones(3), "step": 3}, path)
    refused("'step' is not a tensor")
    torch.save({"w": torch.ones(3).to_sparse()}, path)
    refused("'w' is torch.sparse_coo")
    path.unlink()
    os.mkfifo(path)
    refused("not a regular file")


def test_the_index_and_the_files_are_checked_both_ways(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "x.bin")
    torch.save({"c": torch.ones(2)}, tmp_path / "y.bin")

    def index(**weight_map: str) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    index(a="x.bin", b="x.bin", c="y.bin")
    assert set(BinReader(tmp_path).layout()) == {"a", "b", "c"}
    for weight_map, message in (
        ({"a": "x.bin", "c": "y.bin"}, "x.bin: holds tensor 'b'"),
        ({"a": "x.bin", "b": "x.bin", "c": "x.bin"}, "x.bin: tensor 'c' is in .* not in the file"),
        ({"a": "x.bin", "b": "x.bin", "c": "z.bin"}, "z.bin: no such file"),
        ({"a": "../x.bin"}, "not the name of a file"),
    ):
        index(**weight_map)
        with pytest.raises(UserError, match=message):
            BinReader(tmp_path)


def test_a_file_cut_while_in_use_is_noticed(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(1000, 100)}, tmp_path / SINGLE)
    reader = BinReader(tmp_path)
    os.truncate(tmp_path / SINGLE, 20_000)
    with pytest.raises(UserError, match=r"changed.*'w'"):
        reader.read("w")
