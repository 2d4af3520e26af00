"""Damaged input ends in one line that names the file and the tensor; a kill at any moment leaves nothing that loads."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.mixing import make_models, mix_arguments
from btx_testing.tensors import load_folder, same_bits, temporaries
from safetensors.torch import save_file

from btx_nemo.checkpoints.inspect import inspect_checkpoint
from btx_nemo.checkpoints.safetensors import INDEX
from btx_nemo.errors import UserError
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

SECOND = "model-00002-of-00003.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def shard(folder: Path, count: int = 3) -> None:
    """Cuts a folder's weights into shards with an index; `UP` is in the second."""
    tensors = load_folder(folder)
    (folder / "model.safetensors").unlink()
    names = [UP, *(name for name in tensors if name != UP)]
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        held = names[(number - 1) % count :: count]
        save_file({name: tensors[name] for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change(folder: Path, alter: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrites the second shard."""
    from safetensors.torch import load_file

    tensors = load_file(folder / SECOND)
    alter(tensors)
    save_file(tensors, folder / SECOND)


def truncated(folder: Path) -> None:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 100)


def header_length(folder: Path) -> None:
    with open(folder / SECOND, "r+b") as stream:
        stream.write(struct.pack("<Q", 1 << 40))


def missing_file(folder: Path) -> None:
    (folder / SECOND).unlink()


def twice(folder: Path) -> None:
    name = next(name for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items() if file != SECOND)
    change(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))


def shape_lie(folder: Path) -> None:
    with open(folder / SECOND, "r+b") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = stream.read(length)
        table = json.loads(header)
        table[UP]["shape"] = table[UP]["shape"][::-1]
        stream.seek(8)
        stream.write(json.dumps(table, separators=(",", ":")).encode().ljust(length))


def poisoned(folder: Path) -> None:
    change(folder, lambda tensors: tensors[UP].view(-1)[77:78].fill_(math.nan))


def other_dtype(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({UP: tensors[UP].half()}))


def integers(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({UP: tensors[UP].int()}))


def empty(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"")


def loop(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(SECOND)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "tensor '.*' ends at byte .* truncated"),
        (header_length, r"header length 1099511627776 .*tensor '.*"),
        (missing_file, "missing shard, named in .* for '.*'"),
        (twice, "tensor '.*' (is also in|but .* places it in)"),
        (shape_lie, rf"tensor '{UP}' has shape \[32, 48\] but config.json implies \[48, 32\]"),
        (poisoned, rf"tensor '{UP}' holds a non-finite value \(nan\) at index \[2, 13\]"),
        (other_dtype, f"tensor '{UP}' is float16 but the seed's is float32"),
        (integers, f"tensor '{UP}' is int32; only floating-point weights"),
        (empty, "0 bytes is too short .*places tensor '.*' there"),
        (loop, "cannot be opened .*places tensor '.*' there"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_input_is_one_line_that_names_file_and_tensor(
    tmp_path: Path, commands: CommandServer, damage: Callable[[Path], None], message: str
) -> None:
    config = make_models(tmp_path, "math")
    shard(tmp_path / "math")
    damage(tmp_path / "math")
    before = sorted(path.name for path in tmp_path.iterdir())
    ended = commands.run(*mix_arguments(config))
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert re.search(f"{tmp_path}/math/{SECOND}: .*{message}", ended.err), ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path, commands: CommandServer) -> None:
    config = make_models(tmp_path, "math")
    (tmp_path / "file").write_text("")
    closed = tmp_path / "closed"
    closed.mkdir()
    attribute = shutil.which("chattr") if os.geteuid() == 0 else None
    if attribute and subprocess.run([attribute, "+i", closed], capture_output=True).returncode:
        attribute = None
    closed.chmod(0o555) if not attribute else None
    try:
        places = [tmp_path / "file" / "mix", closed / "mix"]
        for place in places if attribute or os.geteuid() else places[:1]:
            ended = commands.run(*mix_arguments(dataclasses.replace(config, out=str(place))))
            assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
            assert str(place.parent) in ended.err
        assert list(closed.iterdir()) == []
    finally:
        if attribute:
            subprocess.run([attribute, "-i", closed], check=True)


def loads(folder: Path) -> bool:
    """Whether a folder is taken for a model."""
    try:
        inspect_checkpoint(folder)
    except UserError:
        return False
    return True


def test_killed_at_ten_random_moments_nothing_loads_and_a_rerun_succeeds(
    tmp_path: Path, commands: CommandServer
) -> None:
    config = make_models(tmp_path, "math", "code")
    run_mix(dataclasses.replace(config, out=str(tmp_path / "reference")))
    reference = load_folder(tmp_path / "reference")
    slowly = {"before": "btx_testing.mixing:slow_writes?0.02"}
    begun = time.monotonic()
    commands.run(*mix_arguments(dataclasses.replace(config, out=str(tmp_path / "timed"))), **slowly)
    whole = time.monotonic() - begun
    rng, interrupted = random.Random(4), 0
    for _ in range(10):
        running = commands.start(*mix_arguments(config), **slowly)
        time.sleep(rng.uniform(0.1, 1.0) * whole)
        running.kill(group=True)
        running.wait()
        if (tmp_path / "mix").exists():  # it was quicker: then it is whole
            assert same_bits(load_folder(tmp_path / "mix"), reference)
        else:
            interrupted += 1
            for name in temporaries(tmp_path):
                assert not loads(tmp_path / name)
                shutil.copytree(tmp_path / name, tmp_path / "renamed")
                # Killed between the manifest, which is written last, and the renaming, it is whole.
                assert not loads(tmp_path / "renamed") or same_bits(load_folder(tmp_path / "renamed"), reference)
                shutil.rmtree(tmp_path / "renamed")
            run_mix(config)
            assert temporaries(tmp_path) == []
            assert same_bits(load_folder(tmp_path / "mix"), reference) and loads(tmp_path / "mix")
        shutil.rmtree(tmp_path / "mix")
    assert interrupted >= 5


def test_megatron_results_killed_half_way_leave_nothing_that_loads(tmp_path: Path, commands: CommandServer) -> None:
    config: MixConfig = dataclasses.replace(make_models(tmp_path, "math"), format="megatron")
    running = commands.start(*mix_arguments(config), before="btx_testing.mixing:slow_writes?0.05")
    running.kill_when(lambda: any((tmp_path / name / "__0_0.distcp").exists() for name in temporaries(tmp_path)))
    assert not (tmp_path / "mix").exists()
    (left,) = temporaries(tmp_path)
    os.rename(tmp_path / left, tmp_path / "renamed")
    assert not loads(tmp_path / "renamed")
    os.rename(tmp_path / "renamed", tmp_path / left)
    run_mix(config)
    assert temporaries(tmp_path) == [] and loads(tmp_path / "mix")
