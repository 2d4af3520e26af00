"""`doctor`: what the installation can do, what each missing part costs; of all it looks at, it imports torch alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from btx_nemo.errors import EnvironmentLacks

INSTALL = 'pip install "megatron-core>=0.16,<0.20"'
PYTHONS, MEGATRONS = ((3, 10), (3, 13)), ((0, 16), (0, 20))
"""What is supported: from the first, before the second."""
MISSING = "missing"


@dataclass(frozen=True)
class Part:
    """One line of the report."""

    name: str
    found: str
    """Its version, or what was found of it; `MISSING` without it."""
    note: str
    """What it is used for or, where it is missing, what its absence costs."""
    lacking: str = ""
    """Where nothing works without it: why, and the remedy."""


def doctor() -> None:
    """Print the report. Raises EnvironmentLacks when torch or a supported megatron-core is not there."""
    parts = examine()
    console = Console()
    if console.is_terminal:
        table = Table("part", "found", "what that means")
        for part in parts:
            style = "red" if part.lacking else "yellow" if part.found == MISSING else "green"
            table.add_row(part.name, Text(part.found, style=style), Text(part.note))
        console.print(table)
    else:  # nothing is cut or wrapped when it is piped
        for part in parts:
            print(f"{part.name}: {part.found}; {part.note}")
    lacking = [part.lacking for part in parts if part.lacking]
    if lacking:
        raise EnvironmentLacks("; ".join(lacking))


def examine() -> list[Part]:
    """Every part that matters, the necessary ones first."""
    return [
        _python(),
        _torch(),
        _megatron(),
        _transformers(),
        _device(),
        _transformer_engine(),
        _apex(),
        _grouped_gemm(),
        _nemo(),
        _bridge(),
        _slurm(),
    ]


def _python() -> Part:
    found = platform.python_version()
    if PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        return Part("Python", found, "supported are 3.10, 3.11 and 3.12")
    return Part("Python", found, "not tested: supported are 3.10, 3.11 and 3.12")


def _torch() -> Part:
    found = _version("torch")
    if found is None:
        return Part("torch", MISSING, "nothing works without it", "torch is not installed; pip install torch")
    return Part("torch", found, "computes everything")


def _megatron() -> Part:
    found = _version("megatron-core")
    if found is None or not _has("megatron.core"):
        return Part("megatron-core", MISSING, "no training", f"megatron-core is not installed; {INSTALL}")
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if not MEGATRONS[0] <= numbers < MEGATRONS[1]:
        return Part("megatron-core", found, "not supported", f"megatron-core {found} is not supported; {INSTALL}")
    stacks: dict[tuple[int, ...], str] = {(0, 16): "stack A (Python 3.10, 3.11)", (0, 19): "stack B (Python 3.12)"}
    return Part("megatron-core", found, stacks.get(numbers, "between the stacks that are tested, 0.16 and 0.19"))


def _transformers() -> Part:
    found = _version("transformers")
    if found is None:
        return Part("transformers", MISSING, "no tokenizers, and no logits of exported models to compare")
    return Part("transformers", found, "tokenizers, and the other side of verify")


def _device() -> Part:
    try:
        import torch
    except Exception as error:  # a broken installation: whatever its libraries raise
        return Part("device", MISSING, f"torch cannot be imported ({error})", "torch cannot be imported; reinstall it")
    if not torch.cuda.is_available():
        return Part("device", "CPU over gloo", "all layouts work, slowly: for tests and the demo")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Part("device", shown, f"NCCL, CUDA {torch.version.cuda}")


def _transformer_engine() -> Part:
    found = _version("transformer-engine", "transformer_engine")
    if found is None:
        return Part("Transformer Engine", MISSING, "on GPUs: no fused layers and no FP8; not used on CPU")
    return Part("Transformer Engine", found, "fused layers on GPUs; not used on CPU")


def _apex() -> Part:
    """NVIDIA Apex is not on PyPI, and the `apex` that is there is another project: look for what it offers."""
    features = [name for name, there in (("amp_C", _has("amp_C")), ("apex.normalization", _has_apex_norms())) if there]
    if features:
        return Part("Apex", _version("apex") or "found", f"fused optimizer and norm kernels ({', '.join(features)})")
    cost = "on GPUs without Transformer Engine: slower optimizer and norms"
    if _has("apex"):
        cost += "; the package named apex here is not NVIDIA's"
    return Part("Apex", MISSING, cost)


def _has_apex_norms() -> bool:
    # Not find_spec("apex.normalization"): that would import apex, whichever project it is.
    spec = importlib.util.find_spec("apex")
    places = spec.submodule_search_locations if spec else None
    return any((Path(place) / "normalization" / "__init__.py").is_file() for place in places or ())


def _grouped_gemm() -> Part:
    found = _version("nv-grouped-gemm", "grouped-gemm")
    if found is None:
        return Part("grouped GEMM", MISSING, "costs nothing: experts run one after the other")
    return Part("grouped GEMM", found, "not used: experts run one after the other")


def _nemo() -> Part:
    found = _version("nemo-toolkit", "nemo_toolkit")
    if found is None:
        return Part("NeMo", MISSING, "costs nothing: no command uses it")
    if int(found.split(".")[0]) >= 3:
        return Part("NeMo", found, "has no language models from 3.0 on; 2.7.3 is the last with them")
    return Part("NeMo", found, "no command uses it")


def _bridge() -> Part:
    found = _version("megatron-bridge")
    if found is None:
        return Part("Megatron-Bridge", MISSING, "costs nothing: import and export do not use it")
    return Part("Megatron-Bridge", found, "no command uses it")


def _slurm() -> Part:
    program = shutil.which("sbatch")
    if program is None:
        return Part("Slurm", MISSING, "submit runs the jobs here, one after the other")
    try:
        ran = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError) as error:
        return Part("Slurm", program, f"cannot be run ({error}): use submit --local")
    if ran.returncode:  # without a slurm.conf it does not even tell its version
        said = (ran.stderr.strip().splitlines() or [f"exit {ran.returncode}"])[-1]
        return Part("Slurm", program, f"not configured here ({said}): use submit --local")
    return Part("Slurm", ran.stdout.strip().removeprefix("slurm "), "submit starts jobs in parallel")


def _version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
