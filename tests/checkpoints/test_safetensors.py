"""Our reader and writer against the safetensors library, and every kind of damage."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from btx_testing.tensors import MemoryReader, bits, info_of, load_folder, same_bits
from safetensors.torch import save_file

from btx_nemo.checkpoints.safetensors import INDEX, SafetensorsReader
from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.errors import UserError
from btx_nemo.plan.execute import execute
from btx_nemo.plan.expr import Take
from btx_nemo.plan.plan import Job, Plan

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def tensors() -> dict[str, torch.Tensor]:
    made = {f"t.{i}": (torch.randn(7 + i, 5, 3) * 9).to(dtype) for i, dtype in enumerate(DTYPES)}
    return {**made, "scalar": torch.tensor(2.5), "wide": torch.randn(3, 40_000), "empty": torch.zeros(0, 4)}


def write(folder: Path, given: dict[str, torch.Tensor], shard_size: int) -> None:
    reader = MemoryReader(given)
    jobs = tuple(Job(name, info_of(tensor), Take("s", name)) for name, tensor in given.items())
    sink = SafetensorsSink(folder, {job.target: job.info for job in jobs}, shard_size)
    execute(Plan(jobs, {"s": reader.layout()}), {"s": reader}, sink, workers=3)
    sink.close()


@pytest.mark.parametrize("shard_size", [1 << 30, 1000, 1])
def test_the_library_reads_what_we_write(tmp_path: Path, shard_size: int) -> None:
    given = tensors()
    write(tmp_path, given, shard_size)
    assert same_bits(load_folder(tmp_path), given)
    reader = SafetensorsReader(tmp_path)
    assert all(torch.equal(bits(reader.read(name)), bits(given[name])) for name in given)
    if shard_size < 1 << 30:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in given.values())


def test_we_read_every_slice_of_what_the_library_writes(tmp_path: Path) -> None:
    given = tensors()
    save_file(given, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert reader.layout() == {name: info_of(tensor) for name, tensor in given.items()}
    for name, tensor in given.items():
        assert torch.equal(bits(reader.read(name)), bits(tensor))
    for parts in ([slice(1, 3)], [slice(0, 7), slice(2, 4)], [slice(3, 4), slice(None), slice(1, 3)], [slice(2, 2)]):
        assert torch.equal(reader.read("t.1", parts), given["t.1"][tuple(parts)])
    for parts in ([slice(None), slice(5, 9)], [slice(1, 3), slice(100, 39_000)], [slice(2, 3), slice(0, 1)]):
        assert torch.equal(reader.read("wide", parts), given["wide"][tuple(parts)])


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list, offsets: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWICE = b'{"w":%s,"w":%s}' % tuple(json.dumps(entry([1], [at, at + 4])).encode() for at in (0, 4))
DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "short": (b"abc", "too short"),
    "length beyond the file": (raw({}, length=1 << 60), "header length"),
    "length of 2^64-1": (b"\xff" * 8 + b"{}", "header length"),
    "not json": (raw(b"{nonsense"), "not valid JSON"),
    "not utf-8": (raw(b'{"\xff": 1}'), "not valid JSON"),
    "deep json": (raw(b'{"a":' + b"[" * 200_000), "not valid JSON"),
    "not a table": (raw(b"[1]"), "does not start"),
    "huge integer": (raw(b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'), "JSON|shape"),
    "truncated": (raw({"w": entry([4], [0, 16])}, b"\0" * 12), "'w' ends at byte"),
    "trailing bytes": (raw({"w": entry([4], [0, 16])}, b"\0" * 20), "after the last tensor"),
    "shape lie": (raw({"w": entry([5], [0, 16])}, b"\0" * 16), "'w': shape"),
    "overflowing shape": (raw({"w": entry([1 << 62, 1 << 62, 0, 4], [0, 16])}, b"\0" * 16), "'w': shape"),
    "negative size": (raw({"w": entry([-4], [0, 16])}, b"\0" * 16), "'w': shape"),
    "boolean size": (raw({"w": entry([True], [0, 4])}, b"\0" * 4), "'w': shape"),
    "overlap": (raw({"v": entry([4], [0, 16]), "w": entry([4], [8, 24])}, b"\0" * 24), "'w' overlaps"),
    "gap": (raw({"v": entry([4], [0, 16]), "w": entry([4], [20, 36])}, b"\0" * 36), "'w' leaves a gap"),
    "reversed offsets": (raw({"w": entry([4], [16, 0])}, b"\0" * 16), "'w': offsets"),
    "unknown dtype": (raw({"w": entry([4], [0, 16], "F33")}, b"\0" * 16), "'w': dtype 'F33'"),
    "missing field": (raw({"w": {"dtype": "F32", "shape": [4]}}, b"\0" * 16), "'w': header entry"),
    "same name twice": (raw(TWICE, b"\0" * 8), "names 'w' twice"),
    "no tensor": (raw({}), "no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    content, message = DAMAGE[kind]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        SafetensorsReader(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def sharded(folder: Path) -> dict:
    write(folder, {"a": torch.randn(4), "b": torch.randn(4), "c": torch.randn(4)}, 1)
    return json.loads((folder / INDEX).read_text())


def rewrite(folder: Path, index: dict) -> None:
    (folder / INDEX).write_text(json.dumps(index))


def missing_file(folder: Path, index: dict) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def extra_shard(folder: Path, index: dict) -> None:
    (folder / "model-00004-of-00004.safetensors").write_bytes(raw({"d": entry([1], [0, 4])}, b"\0" * 4))


def unnamed_tensor(folder: Path, index: dict) -> None:
    save_file({"b": torch.randn(4), "z": torch.randn(2)}, folder / "model-00002-of-00003.safetensors")


def duplicate(folder: Path, index: dict) -> None:
    save_file({"b": torch.randn(4), "a": torch.randn(4)}, folder / "model-00002-of-00003.safetensors")


def named_but_absent(folder: Path, index: dict) -> None:
    index["weight_map"]["q"] = "model-00001-of-00003.safetensors"
    rewrite(folder, index)


def path_in_index(folder: Path, index: dict) -> None:
    index["weight_map"]["a"] = "../elsewhere.safetensors"
    rewrite(folder, index)


def loop(folder: Path, index: dict) -> None:
    missing_file(folder, index)
    (folder / "model-00002-of-00003.safetensors").symlink_to("model-00002-of-00003.safetensors")


def fifo(folder: Path, index: dict) -> None:
    missing_file(folder, index)
    os.mkfifo(folder / "model-00002-of-00003.safetensors")


def directory(folder: Path, index: dict) -> None:
    missing_file(folder, index)
    (folder / "model-00002-of-00003.safetensors").mkdir()


def no_index(folder: Path, index: dict) -> None:
    (folder / INDEX).unlink()


def bad_index(folder: Path, index: dict) -> None:
    (folder / INDEX).write_text('{"weight_map": 3}')


def both(folder: Path, index: dict) -> None:
    save_file({"a": torch.randn(4)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing_file, "00002-of-00003.*missing shard.*'b'"),
        (extra_shard, "00004-of-00004.*not named"),
        (unnamed_tensor, "00002-of-00003.*'z'"),
        (duplicate, "'a'"),
        (named_but_absent, "'q'.*not in the file"),
        (path_in_index, "elsewhere"),
        (loop, "00002-of-00003.*cannot be opened"),
        (fifo, "00002-of-00003.*not a regular file"),
        (directory, "00002-of-00003.*not a regular file"),
        (no_index, "no model.safetensors.index.json"),
        (bad_index, "no weight_map"),
        (both, "has both"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_index_files_and_headers_are_checked_both_ways(
    tmp_path: Path, damage: Callable[[Path, dict], None], message: str
) -> None:
    damage(tmp_path, sharded(tmp_path))
    with pytest.raises(UserError, match=message):
        SafetensorsReader(tmp_path)


def test_a_file_cut_while_in_use_is_noticed(tmp_path: Path) -> None:
    save_file({"w": torch.randn(100, 100)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 20_000)
    with pytest.raises(UserError, match=r"changed.*'w'"):
        reader.read("w")


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "blobs" / "x")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "x")
    assert torch.equal(SafetensorsReader(tmp_path).read("w"), torch.ones(3))
