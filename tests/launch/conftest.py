"""A runs folder for tests without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from btx_testing.slurm import FAKE

from btx_nemo.launch import slurm


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a seed and a space in its name, the stand-in for the command, and no Slurm."""
    for name in [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_", "BTX_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BTX_CLI", str(FAKE))
    monkeypatch.setattr(slurm, "absent", lambda: "no Slurm")
    folder = tmp_path / "my runs"
    (folder / "seed").mkdir(parents=True)
    (folder / "seed" / "config.json").write_text("{}")
    return folder


class Queue:
    """The queue of a Slurm that runs nothing (fake_slurm.py)."""

    def __init__(self, folder: Path):
        self.folder = folder

    def jobs(self) -> dict[str, str]:
        """Id -> state."""
        path = self.folder / "queue"
        lines = path.read_text().splitlines() if path.exists() else []
        return {line.split("\x1f")[0]: line.split("\x1f")[1] for line in lines}

    def change(self, job: str, *, state: str = "", name: str = "") -> None:
        """Another state or name of a job; GONE for one that has ended."""
        lines = [line.split("\x1f") for line in (self.folder / "queue").read_text().splitlines()]
        for facts in lines:
            if facts[0] == job:
                facts[1], facts[2] = state or facts[1], name or facts[2]
        kept = ["\x1f".join(facts) + "\n" for facts in lines if facts[1] != "GONE"]
        (self.folder / "queue").write_text("".join(kept))

    def set(self, name: str, text: str) -> None:
        """How it behaves: refuse, say, away or array, as fake_slurm.py has it."""
        (self.folder / name).write_text(text)

    def calls(self, command: str) -> list[str]:
        """The lines of a command so far."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.split()[0] == command]


@pytest.fixture
def queue(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Slurm's commands on PATH, with an empty queue."""
    folder = tmp_path / "fake slurm"
    (folder / "bin").mkdir(parents=True)
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (folder / "bin" / name).symlink_to(Path(__file__).with_name("fake_slurm.py"))
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "absent", lambda: "")
    return Queue(folder)
