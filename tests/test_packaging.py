"""What an installed btx-nemo carries."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, check=True, timeout=120
    )
    return next(out.glob("*.whl"))


def test_wheel_carries_conf_and_slurm_and_nothing_foreign(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("conf", "slurm"):
        in_tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert in_tree and {f"btx_nemo/{path}" for path in in_tree} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"btx_nemo"}


def test_installed_copy_finds_its_conf_and_scripts(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import btx_nemo.config.load as l, btx_nemo.launch.submit as s\n"
        "print(l.conf_dir()); print(s.scripts_dir())\n"
        "print(l.load('train', 'expert', ['domain=math'])['out'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        str(tmp_path / "btx_nemo" / "conf"),
        str(tmp_path / "btx_nemo" / "slurm"),
        "runs/expert-math",
    ]
