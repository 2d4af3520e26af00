"""torch_dist checkpoints: ours read by Megatron and by torch, theirs read by us, and nothing in them is ever run."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from btx_testing import dist_jobs
from btx_testing.pool import RankPool
from btx_testing.tensors import MemoryReader, bits, info_of, same_bits

from btx_nemo.checkpoints.dist_format import METADATA, read_metadata
from btx_nemo.checkpoints.torch_dist import DistReader
from btx_nemo.checkpoints.torch_dist_sink import DistSink
from btx_nemo.errors import UserError
from btx_nemo.plan.execute import execute
from btx_nemo.plan.expr import Take
from btx_nemo.plan.layout import PAGE
from btx_nemo.plan.plan import Job, Plan


def tensors() -> dict[str, torch.Tensor]:
    return {
        "decoder.a": torch.randn(40, 30),
        "decoder.b": torch.randn(4, 11, 6).bfloat16(),
        "decoder.c": torch.randn(7).half(),
        "decoder.d": torch.randn(1, 5),
    }


def write(folder: Path, given: dict[str, torch.Tensor], *, workers: int = 2, chunk_bytes: int = 400) -> None:
    reader = MemoryReader(given)
    jobs = tuple(Job(name, info_of(tensor), Take("s", name)) for name, tensor in given.items())
    sink = DistSink(folder, {job.target: job.info for job in jobs}, files=3, chunk_bytes=chunk_bytes)
    execute(Plan(jobs, {"s": reader.layout()}), {"s": reader}, sink, workers=workers)
    sink.close()


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    given = tensors()
    write(tmp_path, given)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert same_bits(loaded, given)


def test_every_part_is_an_archive_with_its_checksum(tmp_path: Path) -> None:
    """As unzip and torch.load read it; elements begin on a page, so that they can go past the cache."""
    import io
    import zipfile

    given = tensors() | {
        "decoder.e": torch.randn(3000, 500),
        "decoder.f": torch.tensor(2.5),
        "decoder.g": torch.ones(1),
    }
    write(tmp_path, given, chunk_bytes=5 << 20, workers=3)
    parts = {name: [] for name in given}
    for name, tensor in read_metadata(tmp_path).items():
        for chunk in tensor.chunks:
            raw = (tmp_path / chunk.file).read_bytes()[chunk.offset : chunk.offset + chunk.length]
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                assert archive.testzip() is None, name
            parts[name].append(torch.load(io.BytesIO(raw), weights_only=True))
            payload = bits(parts[name][-1]).numpy().tobytes()
            assert (chunk.offset + raw.index(payload)) % PAGE == 0
    assert len(parts["decoder.e"]) == 2
    assert same_bits({name: torch.cat(p) if p[0].dim() else p[0] for name, p in parts.items()}, given)


def test_megatron_reads_what_we_write(tmp_path: Path, ranks: RankPool) -> None:
    given = tensors()
    write(tmp_path, given)
    assert same_bits(ranks.run(dist_jobs.mcore_reads, str(tmp_path), ranks=1)[0], given)


def test_we_read_what_megatron_writes(tmp_path: Path, ranks: RankPool) -> None:
    given = tensors()
    ranks.run(dist_jobs.mcore_writes, str(tmp_path), given, ranks=1)
    reader = DistReader(tmp_path)
    assert same_bits({name: reader.read(name) for name in reader.layout()}, given)
    assert reader.training_state == ["optimizer.state.exp_avg.w"]
    assert torch.equal(reader.read("decoder.a", [slice(15, 27), slice(3, 9)]), given["decoder.a"][15:27, 3:9])


def test_slices_cross_chunks(tmp_path: Path) -> None:
    given = tensors()
    write(tmp_path, given)
    reader = DistReader(tmp_path)
    for parts in ([slice(2, 39)], [slice(2, 3), slice(5, 9)], [slice(0, 40), slice(29, 30)]):
        assert torch.equal(reader.read("decoder.a", parts), given["decoder.a"][tuple(parts)])
    assert torch.equal(
        reader.read("decoder.b", [slice(1, 4), slice(3, 9), slice(2, 5)]), given["decoder.b"][1:4, 3:9, 2:5]
    )


def test_files_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    given = tensors()
    for workers in (1, 5):
        (tmp_path / str(workers)).mkdir()
        write(tmp_path / str(workers), given, workers=workers)
    for path in (tmp_path / "1").iterdir():
        if path.suffix == ".distcp":
            assert path.read_bytes() == (tmp_path / "5" / path.name).read_bytes(), path.name


class Exploit:
    """A pickle that would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def test_nothing_in_the_metadata_is_run(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(Exploit(tmp_path / "ran")))
    with pytest.raises(UserError, match=r"\.metadata.*system.*refused"):
        DistReader(tmp_path)
    for name in (
        "builtins eval",
        "torch load",
        "torch.serialization load",
        "torch.distributed.checkpoint.filesystem os",
    ):
        module, attribute = name.split()
        (tmp_path / METADATA).write_bytes(f"c{module}\n{attribute}\n(S'1'\ntR.".encode())
        with pytest.raises(UserError):
            DistReader(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_nothing_in_a_chunk_is_run(tmp_path: Path) -> None:
    import io
    import zipfile

    given = {"decoder.a": torch.randn(40, 30)}
    write(tmp_path, given, chunk_bytes=1 << 20)
    data = tmp_path / "__0_0.distcp"
    (chunk,) = read_metadata(tmp_path)["decoder.a"].chunks
    before = data.read_bytes()[: chunk.offset]
    archive = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data.read_bytes()[chunk.offset :])) as old, zipfile.ZipFile(archive, "w") as new:
        for member in old.namelist():
            bad = member.endswith("data.pkl")
            new.writestr(member, pickle.dumps(Exploit(tmp_path / "ran")) if bad else old.read(member))
    content = archive.getvalue()
    # The archive keeps its length in the metadata: its end of directory must be where the old one was.
    assert len(content) <= chunk.length
    padding = chunk.length - len(content)
    data.write_bytes(before + content[:-2] + padding.to_bytes(2, "little") + b"\0" * padding)
    with pytest.raises(UserError, match=r"decoder\.a.*refused"):
        DistReader(tmp_path).read("decoder.a")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"nonsense", b"\x80\x05\x96" + b"\xff" * 8, b"\x80\x04" + b"(" * 100_000 + b".", b"N.", b"]."],
    ids=["empty", "cut", "text", "huge bytearray", "marks", "none", "list"],
)
def test_damaged_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path / METADATA))):
        DistReader(tmp_path)


def test_cut_at_any_byte_the_metadata_is_refused(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    whole = (tmp_path / METADATA).read_bytes()
    for size in range(0, len(whole), 41):
        (tmp_path / METADATA).write_bytes(whole[:size])
        with pytest.raises(UserError):
            DistReader(tmp_path)


def test_missing_and_truncated_files_are_named_with_the_tensor(tmp_path: Path) -> None:
    write(tmp_path, {"decoder.a": torch.randn(40, 30)})
    data = tmp_path / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 10)
    with pytest.raises(UserError, match=r"__0_0\.distcp: tensor 'decoder.a'.*truncated"):
        DistReader(tmp_path)
    data.unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp: no such file"):
        DistReader(tmp_path)


def test_garbage_in_a_chunk_is_refused_or_leaves_shape_and_dtype(tmp_path: Path) -> None:
    given = {"decoder.a": torch.randn(4, 3)}
    write(tmp_path, given, chunk_bytes=1 << 20)
    data = tmp_path / "__0_0.distcp"
    whole = data.read_bytes()
    for at in range(0, len(whole), 7):
        data.write_bytes(whole[:at] + b"\xa5" * 9 + whole[at + 9 :])
        try:
            read = DistReader(tmp_path).read("decoder.a")
        except UserError:
            continue
        assert read.shape == (4, 3) and len(bits(read)) == 48
