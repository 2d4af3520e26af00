"""Checkpoints in the background, their checksums, and those with weights alone."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from btx_testing.commands import CommandServer, ok
from btx_testing.optimizer_jobs import state_to_save
from btx_testing.pool import RankPool
from btx_testing.runs import TinyWorld, metrics, saved_step, weights
from btx_testing.train_jobs import parameter_counts
from megatron.core.dist_checkpointing.strategies import common

from btx_nemo.checkpoints.atomic import TEMPORARY
from btx_nemo.checkpoints.dist_format import read_metadata
from btx_nemo.checkpoints.manifest import sha256_of
from btx_nemo.config.schema import CheckpointConfig
from btx_nemo.train.saving import Saver, _prune

STEP = "btx_nemo.train.run:train_step"


def test_written_in_the_background_it_is_the_same(
    world: TinyWorld, commands: CommandServer, whole_pair: Path, tmp_path: Path
) -> None:
    """File by file, although training went on in the meantime; killed in the middle of the third one, too."""
    out = tmp_path / "run"
    options = {"layout__ep": 2, "checkpoint__asynchronous": True, "checkpoint__keep": 3}
    arguments = world.arguments("tiny_mix", out, **options)
    slow = commands.start_ranks(2, *arguments, before=f"btx_testing.death:slow_writer?0.3@{STEP}:12")
    assert {process.wait().code for process in slow} == {-signal.SIGKILL}
    assert saved_step(out) in (4, 8)
    for ended in commands.run_ranks(2, *arguments):
        ok(ended)
    assert weights(out) == weights(whole_pair)
    assert metrics(out) == metrics(whole_pair)
    assert saved_step(out) == 12
    theirs = whole_pair / "checkpoints" / "step_00000012"
    for path in theirs.glob("*.distcp"):
        assert path.read_bytes() == (out / "checkpoints" / "step_00000012" / path.name).read_bytes()


def test_training_does_not_wait(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """A writer that never ends: three steps later the run is killed, with nothing saved and nothing half."""
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out, checkpoint__asynchronous=True)
    ended = commands.run(*arguments, before=f"btx_testing.death:slow_writer?1000@{STEP}:8")
    assert ended.code == -signal.SIGKILL
    assert [record["step"] for record in metrics(out)][-1] == 7
    assert saved_step(out) == 0
    assert [path.name.startswith(".step_00000004.tmp-") for path in (out / "checkpoints").iterdir()] == [True]
    ok(commands.run(*arguments))


def test_a_writer_that_is_killed_fails_the_run(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """As a machine short of memory may do; the checkpoint before is as it was."""
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out, checkpoint__asynchronous=True)
    ended = commands.run(*arguments, before="btx_testing.death:writer_killed?2")
    assert ended.code == 1, ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("btx-nemo train:")]
    assert "a checkpoint could not be written" in line
    assert saved_step(out) == 4
    ok(commands.run(*arguments))


@pytest.mark.parametrize(
    "place",
    [
        "serialization:save_config",
        "strategies.filesystem_async:FileSystemWriterAsync.finish",
        pytest.param("strategies.common:TorchCommonSaveStrategy.save_common", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_is_full_for_the_first_rank_alone(
    world: TinyWorld, commands: CommandServer, tmp_path: Path, place: str
) -> None:
    """Between Megatron's collectives: all ranks tell the same, and the checkpoint before is as it was."""
    if "Torch" in place and not hasattr(common, "TorchCommonSaveStrategy"):
        pytest.skip("this Megatron writes no such file; Megatron-Core 0.16, on Python 3.10 or 3.11, does")
    out = tmp_path / "run"
    before = f"btx_testing.death:on_rank?0 disk_full_at megatron.core.dist_checkpointing.{place}:2"
    arguments = world.arguments("tiny_mix", out, layout__ep=2)
    ends = [process.wait() for process in commands.start_ranks(2, *arguments, before=before)]
    assert [ended.code for ended in ends] == [2, 2], ends
    told = "the disk or a quota is full, a checkpoint could not be saved"
    assert all(ended.err.count(told) == 1 for ended in ends)
    assert ends[1].err.endswith(" (rank 1)\n") and ends[1].err.count("\n") == 1
    assert saved_step(out) == 4
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000004"]


def test_every_file_has_its_checksum(commands: CommandServer, whole_pair: Path) -> None:
    (folder,) = (whole_pair / "checkpoints").iterdir()
    files = json.loads((folder / "manifest.json").read_text())["files"]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(files) == there - {"manifest.json"}
    for name, facts in files.items():
        assert facts["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    ended = ok(commands.run("inspect", whole_pair, "--checksums"))
    assert "files are as they were written" in ended.out


def test_one_changed_bit_is_found(world: TinyWorld, commands: CommandServer, tmp_path: Path, whole_pair: Path) -> None:
    """In a file of the second rank; sizes alone would not tell."""
    out = Path(shutil.copytree(whole_pair, tmp_path / "run"))
    (out / "DONE").unlink()
    path = next((out / "checkpoints" / "step_00000012").glob("__1_*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ended = commands.run("inspect", out, "--checksums")
    assert ended.code == 2 and str(path) in ended.err and ended.err.count("\n") == 1
    arguments = world.arguments("tiny_mix", out, layout__ep=2, checkpoint__verify=True)
    ends = [process.wait() for process in commands.start_ranks(2, *arguments)]
    assert [ended.code for ended in ends] == [2, 2]
    assert f"{path}: its bytes are not those that were written" in ends[0].err


def test_weights_alone_at_the_end(world: TinyWorld, commands: CommandServer, whole_pair: Path, tmp_path: Path) -> None:
    """The checkpoints on the way have the optimizer; the last one is a third, ends the run and starts another."""
    out = tmp_path / "run"
    arguments = world.arguments("tiny_mix", out, layout__ep=2, checkpoint__optimizer=False, checkpoint__keep=2)
    before = "btx_testing.death:on_rank?0 at btx_nemo.train.run:write_file:1"  # DONE
    assert commands.start_ranks(2, *arguments, before=before)[0].wait().code == -signal.SIGKILL
    size = {
        folder.name: sum(path.stat().st_size for path in folder.glob("*.distcp"))
        for folder in (out / "checkpoints").iterdir()
    }
    assert size["step_00000012"] < 0.45 * size["step_00000008"]
    for ended in commands.run_ranks(2, *arguments):
        ok(ended)
    assert weights(out) == weights(whole_pair)

    (out / "DONE").unlink()
    manifest = out / "checkpoints" / "step_00000012" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 12', '"step": 11'))
    ended = commands.run(*world.arguments("tiny_mix", out))
    assert ended.code == 2 and "has weights alone" in ended.err and ended.err.count("\n") == 1
    ok(commands.run(*world.arguments("tiny_mix", tmp_path / "next", init_from=out, steps=2, optim__warmup_steps=0)))


def test_gathered_on_the_first_rank_it_is_the_same(
    world: TinyWorld, commands: CommandServer, ranks: RankPool, whole_pair: Path, tmp_path: Path
) -> None:
    """File by file; the second of two data-parallel ranks holds nothing, and the first no more than without."""
    held = [ranks.run(state_to_save, str(world.dense), {}, {}, on_first, ranks=2) for on_first in (False, True)]
    assert held[0][0] == held[0][1] == held[1][0] != held[1][1] == {"optimizer_parts": 0, "averages": 0}
    out = tmp_path / "run"
    for ended in commands.run_ranks(
        2, *world.arguments("tiny_mix", out, layout__ep=2, checkpoint__gather_on_first=True)
    ):
        ok(ended)
    mine, theirs = (run / "checkpoints" / "step_00000012" for run in (out, whole_pair))
    names = {path.name for path in theirs.iterdir() if path.is_file()}
    assert names == {path.name for path in mine.iterdir() if path.is_file()}
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= names
    assert read_metadata(mine) == read_metadata(theirs)  # which has the folder's name in it, too
    for name in names - {".metadata", "manifest.json"}:
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name


def test_frozen_experts_beside_ones_that_train_cost_little_to_save(ranks: RankPool, world: TinyWorld) -> None:
    """Their places in the optimizer's state share one tensor of zeros; only the rank that writes has any."""
    frozen = "*.local_experts.0.*"
    options = {"freeze": [frozen], "ema": {"decay": 0.9}}
    first, second = ranks.run(state_to_save, str(world.mixture), {}, options, True, ranks=2)
    (sizes,) = ranks.run(parameter_counts, str(world.mixture), ranks=1)
    of_layer = sum(size for name, size in sizes.items() if fnmatch(name, f"*.layers.0.{frozen}"))
    total = sum(sizes.values())
    assert of_layer > 0
    assert first == {"optimizer_parts": 3 * (total - 2 * of_layer) + of_layer, "averages": total}
    assert second == {"optimizer_parts": 0, "averages": 0}


def test_what_cannot_be_removed_now_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a folder keeps what another node has open; it is no checkpoint any more, and goes the next time."""
    folder = tmp_path / "checkpoints"
    for step in (4, 8, 12):
        (folder / f"step_{step:08d}").mkdir(parents=True)
    with monkeypatch.context() as busy:
        busy.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOTEMPTY, "not empty")))
        _prune(folder / "step_00000012", 2)
    assert [path.name for path in sorted(folder.glob("step_*"))] == ["step_00000008", "step_00000012"]
    (left,) = folder.glob(".*")
    assert TEMPORARY.fullmatch(left.name)
    model: Any = None  # of which no word is written
    next_one = Saver(tmp_path, CheckpointConfig(), model, None)._make_room(16)
    assert list(folder.glob(".*")) == [next_one]


def test_checksums_of_files_larger_than_a_block(tmp_path: Path) -> None:
    data = bytes(range(256)) * 12345
    (tmp_path / "file").write_bytes(data)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(data).hexdigest()
