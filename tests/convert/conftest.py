"""An environment with another transformers."""

from __future__ import annotations

import subprocess
import sysconfig
import venv

import pytest


@pytest.fixture(scope="session")
def transformers4(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with transformers 4.57, and otherwise the packages of this one."""
    folder = tmp_path_factory.mktemp("transformers-4") / "env"
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_paths()["purelib"])
    program = str(folder / "bin" / "python")
    install = subprocess.run(
        [program, "-m", "pip", "install", "-q", "transformers==4.57.*"], capture_output=True, text=True, timeout=500
    )
    if install.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed: {install.stderr.strip().splitlines()[-1]}")
    return program
