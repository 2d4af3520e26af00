"""doctor reports what is there, says what is missing, and imports nothing heavy to find out."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from btx_nemo import doctor
from btx_nemo.errors import EnvironmentLacks


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Other versions of some distributions; None: not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        key = name.replace("-", "_")
        if key not in versions:
            return real(name)
        if versions[key] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(versions[key])

    monkeypatch.setattr(importlib.metadata, "version", version)


def part(name: str) -> doctor.Part:
    return next(part for part in doctor.examine() if part.name == name)


def test_the_report_names_every_part_with_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.doctor()
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == [
        "Python",
        "torch",
        "megatron-core",
        "transformers",
        "device",
        "Transformer Engine",
        "Apex",
        "grouped GEMM",
        "NeMo",
        "Megatron-Bridge",
        "Slurm",
    ]
    for name in ("torch", "megatron-core", "transformers"):
        assert lines[name].startswith(importlib.metadata.version(name) + "; ")
    stack = {"0.16": "stack A", "0.19": "stack B"}
    assert stack.get(importlib.metadata.version("megatron-core")[:4], "between") in lines["megatron-core"]


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"torch": None}, "torch is not installed; pip install torch"),
        ({"megatron_core": None}, r"megatron-core is not installed; pip install .megatron-core>=0.16,<0.20"),
        ({"megatron_core": "0.15.3"}, "megatron-core 0.15.3 is not supported; pip install"),
        ({"megatron_core": "0.20.0rc1"}, "megatron-core 0.20.0rc1 is not supported; pip install"),
        ({"megatron_core": "1.16.0"}, "megatron-core 1.16.0 is not supported"),
    ],
)
def test_what_nothing_works_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], versions: dict, message: str
) -> None:
    pretend(monkeypatch, **versions)
    with pytest.raises(EnvironmentLacks, match=message):
        doctor.doctor()
    assert "Slurm: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "stack"), [("0.16.1", "stack A"), ("0.17.0", "between the stacks"), ("0.19.2", "stack B")]
)
def test_stacks(monkeypatch: pytest.MonkeyPatch, version: str, stack: str) -> None:
    pretend(monkeypatch, megatron_core=version)
    assert part("megatron-core").found == version and stack in part("megatron-core").note


def test_apex_is_found_by_what_it_offers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    pretend(monkeypatch, apex="0.9.10.dev0")
    assert part("Apex").found == doctor.MISSING and "not NVIDIA's" in part("Apex").note
    (package / "normalization").mkdir()
    (package / "normalization" / "__init__.py").write_text("")
    assert part("Apex").found == "0.9.10.dev0" and "(apex.normalization)" in part("Apex").note
    (tmp_path / "amp_C.py").write_text("raise RuntimeError('imported')")
    assert "(amp_C, apex.normalization)" in part("Apex").note


def test_optional_parts_are_never_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nemo", "transformer_engine", "grouped_gemm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    pretend(monkeypatch, nemo_toolkit="2.7.3", transformer_engine="2.9.0", nv_grouped_gemm="1.1.4", megatron_bridge="0")
    found = {part.name: part.found for part in doctor.examine()}
    assert found["NeMo"] == "2.7.3" and found["Transformer Engine"] == "2.9.0" and found["grouped GEMM"] == "1.1.4"
    pretend(monkeypatch, nemo_toolkit="3.0.0")
    assert "has no language models" in part("NeMo").note


def test_slurm_by_its_own_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert part("Slurm").found == doctor.MISSING
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho slurm 23.11.4\n")
    sbatch.chmod(0o755)
    assert part("Slurm").found == "23.11.4"
    sbatch.write_text("#!/bin/sh\necho no slurm.conf >&2\nexit 1\n")
    assert "not configured here (no slurm.conf)" in part("Slurm").note


def test_the_command_imports_neither_megatron_nor_transformers() -> None:
    code = (
        "import sys; from btx_nemo.cli import main; main(['doctor'])\n"
        "heavy = [m for m in sys.modules if m in ('megatron.core', 'transformers', 'nemo', 'transformer_engine')]\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_command_exits_with_3_when_something_necessary_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from btx_nemo.cli import main

    pretend(monkeypatch, megatron_core=None)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor"])
    assert stopped.value.code == 3
    assert capsys.readouterr().err.count("\n") == 1
