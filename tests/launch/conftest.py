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
    monkeypatch.setattr(slurm, "has_slurm", lambda: False)
    folder = tmp_path / "my runs"
    (folder / "seed").mkdir(parents=True)
    (folder / "seed" / "config.json").write_text("{}")
    return folder
