"""The documented NeMo-Run example, in its dry run. NeMo-Run has an environment of its own: .ci/run makes it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
OWN = REPO / ".venv-nemo-run"


def python() -> str | None:
    """An interpreter that has NeMo-Run."""
    if "BTX_NEMO_RUN_PYTHON" in os.environ:
        return os.environ["BTX_NEMO_RUN_PYTHON"]
    if (OWN / ".complete").exists():
        return str(OWN / "bin" / "python")
    return sys.executable if importlib.util.find_spec("nemo_run") else None


@pytest.mark.skipif(python() is None, reason='no nemo_run: pip install "nemo-run==0.11.1" "leptonai<0.47"')
def test_the_example_renders_the_pipeline(tmp_path: Path) -> None:
    command = [str(python()), str(REPO / "scripts" / "nemo_run_pipeline.py"), "--runs", str(tmp_path / "runs")]
    command += ["--account", "us", "--partition", "gpu", "--nodes", "2", "--gpus", "4", "math", "code"]
    environment = {**os.environ, "NEMORUN_HOME": str(tmp_path / "home"), "COLUMNS": "400"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    tasks = re.split(r"Task (?=[a-z])", ended.stdout)[1:]
    scripts = {
        "expert-math": "train_expert.sh math",
        "expert-code": "train_expert.sh code",
        "mix": "mix.sh math code",
        "joint": "train_mix.sh",
        "export": "export.sh",
    }
    assert [task.split()[0] for task in tasks] == list(scripts)
    for task, (name, script) in zip(tasks, scripts.items()):
        words = " ".join(task.split())
        assert f"--mpi=none --overlap --nodes=1 --ntasks=1 bash {REPO}/slurm/{script} " in words, name
        trains = "train" in script
        assert f"#SBATCH --nodes={2 if trains else 1} " in words
        assert ("#SBATCH --gres=gpu:4" in words) is trains
        assert "#SBATCH --account=us" in words and f"export BTX_RUNS={tmp_path}/runs" in words
