"""What is made of the answers of Slurm's commands, and of those that do not come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from btx_nemo.errors import BtxError, EnvironmentLacks
from btx_nemo.launch import slurm


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for each of Slurm's commands is; the test writes its text."""
    path = tmp_path / "program"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (tmp_path / name).symlink_to(path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


def test_a_controller_that_is_away_is_not_taken_for_jobs_that_are_gone(program: Path) -> None:
    program.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n")
    for ask in (lambda: slurm.jobs({"7"}), lambda: slurm.named(["btx-mix"])):
        with pytest.raises(BtxError, match=r"Slurm does not answer .*Unable to contact"):
            ask()
    program.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    assert slurm.jobs({"7"}) == {}


def test_commands_that_hang(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "PATIENCE", 0.2)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    asks = (slurm.has_slurm, lambda: slurm.jobs({"7"}), lambda: slurm.sbatch(["sbatch"], "x", {}))
    for name, ask in zip(("sbatch", "squeue", "sbatch"), asks):
        with pytest.raises(EnvironmentLacks, match=f"{name}: no answer in 0.2 s; try again when Slurm answers"):
            ask()


def test_an_answer_that_is_no_utf_8(program: Path) -> None:
    program.write_text("#!/bin/sh\nprintf '7|RUNNING|n\\351|1:00|None\\n'\n")
    assert slurm.jobs({"7"})["7"].state == "RUNNING"


def test_why_there_is_no_slurm(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.absent() == ""
    program.write_text("#!/bin/sh\necho 'no such file: /nope' >&2; exit 1\n")
    assert slurm.absent() == "sbatch fails (no such file: /nope)"
    monkeypatch.setenv("PATH", "/nope")
    assert slurm.absent() == "no sbatch on PATH" and not slurm.has_slurm()


@pytest.mark.parametrize(
    ("said", "expected"), [("MaxArraySize            = 51", 51), ("MaxArraySize = 0", 1), ("MaxArraySizes = x", 1001)]
)
def test_how_many_tasks_an_array_may_have(
    said: str, expected: int, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    assert slurm.largest_array() == expected
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm.largest_array() == 1001
