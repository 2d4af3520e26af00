"""Bytes land where they belong, past the cache and through it, whatever the alignment."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from pathlib import Path

import pytest

from btx_nemo.checkpoints import direct
from btx_nemo.checkpoints.direct import OutputFile, PastCache, address, is_cached
from btx_nemo.checkpoints.reader import pread_exactly
from btx_nemo.errors import UserError
from btx_nemo.plan.evaluate import Scratch
from btx_nemo.plan.layout import PAGE

SIZE = 40 * PAGE + 123


def aligned(data: bytes, offset: int) -> memoryview:
    """The bytes in memory whose address agrees with the offset modulo a page."""
    block = bytearray(len(data) + PAGE)
    start = (offset - address(memoryview(block))) % PAGE
    block[start : start + len(data)] = data
    return memoryview(block)[start : start + len(data)]


def cuts(rng: random.Random) -> list[tuple[int, int]]:
    """Parts that cover a file, in random order, half of them cut on pages."""
    at = sorted({0, SIZE, *(rng.randrange(SIZE) for _ in range(12)), *(PAGE * rng.randrange(40) for _ in range(12))})
    parts = list(itertools.pairwise(at))
    rng.shuffle(parts)
    return parts


def check(path: Path, seed: int, *, agree: bool = True) -> OutputFile:
    rng = random.Random(seed)
    content = rng.randbytes(SIZE)
    output = OutputFile(path, SIZE)
    for low, high in cuts(rng):
        output.write(aligned(content[low:high], low if agree else low + 1), low)
    output.sync()
    output.close()
    assert path.read_bytes() == content
    return output


@pytest.mark.parametrize("seed", range(5))
def test_every_byte_lands_where_it_belongs(tmp_path: Path, seed: int) -> None:
    check(tmp_path / "agree", seed)
    check(tmp_path / "differ", seed, agree=False)


def test_whole_pages_go_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not OutputFile(tmp_path / "probe", 0).direct:
        pytest.skip("this file system has no direct writes")
    written = []
    monkeypatch.setattr(direct, "_pwrite", lambda fd, data, offset: written.append(len(data)))
    output = OutputFile(tmp_path / "x", 3 * PAGE)
    output.write(aligned(b"a" * (2 * PAGE + 30), 2**60 * PAGE + PAGE - 20), PAGE - 20)
    assert sum(written) == 30 and written[0] == 20, "the ragged ends only"


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    real_open, real_write, direct_fds = os.open, os.pwrite, set()

    def open_(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            raise OSError(errno.EINVAL, "no direct writes")
        fd = real_open(path, flags & ~os.O_DIRECT, *mode)
        if flags & os.O_DIRECT:
            direct_fds.add(fd)
        return fd

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if fd in direct_fds:
            raise OSError(errno.EINVAL, "no direct writes after all")
        return real_write(fd, data, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert not check(tmp_path / "x", 3).direct


def test_short_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data[:1000]), offset))
    check(tmp_path / "x", 4, agree=False)


def test_a_full_disk_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    output = OutputFile(tmp_path / "x", PAGE)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        output.write(aligned(b"a" * PAGE, 0), 0)


@pytest.mark.parametrize("state", ["cached", "cold", "half", "no direct reads", "no system call"])
def test_reads_past_the_cache_give_the_files_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    rng = random.Random(6)
    content, path = rng.randbytes(3 << 20), tmp_path / "x"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    if state != "cached":
        os.posix_fadvise(fd, 0, (1 << 20) if state == "half" else 0, os.POSIX_FADV_DONTNEED)
    if state == "no system call":
        monkeypatch.setattr(direct, "_CACHESTAT", 10_000)
    if state == "no direct reads":
        real = os.preadv

        def preadv(number: int, buffers: list, offset: int) -> int:
            if number != fd:
                raise OSError(errno.EINVAL, "no")
            return real(number, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(direct, "READ_BYTES", 1 << 19)
    monkeypatch.setattr(direct, "_bounce", threading.local())
    for low, high in ((0, len(content)), (777, 2_000_001), (5, 900), (2_500_001, len(content))):
        past, out = PastCache(fd, path), bytearray(high - low)
        pread_exactly(past, low, memoryview(out), str(path), "w")
        assert out == content[low:high]
        past.close()
    with pytest.raises(UserError, match="'w': file ends early"):
        pread_exactly(PastCache(fd, path), len(content) - (1 << 20), memoryview(bytearray(2 << 20)), str(path), "w")
    os.close(fd)


def test_what_is_read_past_the_cache_is_not_in_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    assert is_cached(fd, 0, 1 << 20)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(fd, 0, 1 << 20) or not OutputFile(tmp_path / "probe", 0).direct:
        pytest.skip("the kernel cannot say, or the file system has no direct reads")
    past = PastCache(fd, path)
    assert past.read(memoryview(bytearray(1 << 20)), 0) == 1 << 20
    assert not is_cached(fd, 0, 1 << 20)
    past.close()
    os.close(fd)


def test_scratch_memory_agrees_with_the_file(tmp_path: Path) -> None:
    import torch

    scratch = Scratch()
    for offset in (0, 64, PAGE - 2, 5 * PAGE + 8):
        with scratch.tensor((3, 5), torch.bfloat16, offset) as tensor:
            assert tensor.data_ptr() % PAGE == offset % PAGE
            tensor.fill_(1)
