"""Output folders appear whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from btx_testing.tensors import temporaries

from btx_nemo.checkpoints import atomic
from btx_nemo.checkpoints.atomic import atomic_dir
from btx_nemo.errors import UserError


def test_it_appears_at_the_end_only(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with atomic_dir(out) as folder:
        (folder / "x").write_text("1")
        assert not out.exists() and folder.parent == out.parent
    assert (out / "x").read_text() == "1" and temporaries(out.parent) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_dir(tmp_path / "out") as folder:
        (folder / "x").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_whatever_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(UserError, match=f"{name}: already exists"), atomic_dir(tmp_path / name):
            pass
    with pytest.raises(UserError, match="cannot be made"), atomic_dir(tmp_path / "file" / "out"):
        pass


def test_no_space_is_known_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=r"needs .*1001 bytes.* are free"), atomic_dir(tmp_path / "new/out", 1001):
        pytest.fail("must not begin")
    assert list(tmp_path.iterdir()) == []
    with atomic_dir(tmp_path / "out", 1000):
        pass


def test_a_disk_that_becomes_full_is_the_users_error_and_leaves_nothing(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(UserError, match="out: the disk became full"), atomic_dir(tmp_path / "out") as folder:
            (folder / "x").write_text("1")
            raise OSError(number, os.strerror(number))
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_one_may_not_write_is_the_users_error_and_a_broken_disk_is_not(tmp_path: Path) -> None:
    for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        with pytest.raises(UserError, match=r"x: .*out cannot be made"), atomic_dir(tmp_path / "out"):
            raise OSError(number, os.strerror(number), "x")
    with pytest.raises(OSError, match="Input/output error"), atomic_dir(tmp_path / "out"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert list(tmp_path.iterdir()) == []


def test_overwriting_keeps_the_old_folder_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for text in ("first", "second"):
        with atomic_dir(out, overwrite=True) as folder:
            (folder / "x").write_text(text)
            assert not out.exists() or (out / "x").read_text() == "first"
        assert (out / "x").read_text() == text
    with pytest.raises(ValueError), atomic_dir(out, overwrite=True) as folder:
        (folder / "x").write_text("third")
        raise ValueError
    assert (out / "x").read_text() == "second" and os.listdir(tmp_path) == ["out"]
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(out)
    for name in ("file", "link"):
        with pytest.raises(UserError, match="already exists"), atomic_dir(tmp_path / name, overwrite=True):
            pytest.fail("must not begin")


def test_a_failed_last_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "x").write_text("old")
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(atomic.os, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"), atomic_dir(out, overwrite=True):
        pass
    assert (out / "x").read_text() == "old" and os.listdir(tmp_path) == ["out"]


def test_what_a_killed_process_left_is_removed_but_not_a_living_ones(tmp_path: Path) -> None:
    code = f"""
import time
from btx_nemo.checkpoints.atomic import atomic_dir
with atomic_dir({str(tmp_path / "out")!r}) as folder:
    (folder / "x").write_text("1")
    print("ready", flush=True)
    time.sleep(60)
"""
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    left = temporaries(tmp_path)
    assert len(left) == 1
    with atomic_dir(tmp_path / "out2"), pytest.raises(RuntimeError), atomic_dir(tmp_path / "out"):
        assert set(left) < set(temporaries(tmp_path)), "the other process is alive: its folder stays"
        raise RuntimeError
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(0.05)
    assert temporaries(tmp_path) == left
    with atomic_dir(tmp_path / "out"):
        pass
    assert temporaries(tmp_path) == []
