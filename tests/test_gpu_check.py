"""scripts/gpu_check.py without a GPU: what it compares and judges, and its code at sizes that say nothing."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from btx_testing.commands import clean_environment

from btx_nemo.megatron.precision import Device

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
HOPPER = Device((9, 0), (12, 9), "2.8.0", True)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPTS / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_check.py"], capture_output=True, text=True, env=clean_environment()
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "gpu_check: no GPU here; run it on a machine that has one\n"


def test_curves_are_told_apart(script: Any) -> None:
    falling = [8 * 0.97**i for i in range(100)]
    near = [loss * (1 + 0.02 * math.sin(i)) for i, loss in enumerate(falling)]
    assert script.compare_curves("delayed", near, falling).status == "ok"
    assert script.compare_curves("delayed", [8.0] * 100, falling).status == "FAILED"
    assert script.compare_curves("delayed", [*falling[:-1], math.nan], falling).status == "FAILED"
    early = [2 * loss if i < 3 else loss for i, loss in enumerate(falling)]
    assert script.compare_curves("delayed", early, falling).status == "ok"


def test_what_runs_on_a_hopper_card(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runs it makes, with stand-ins for their results; mxfp8 is skipped with the preflight's reason."""
    runs: list[tuple[Any, Any, Any]] = []

    def run(size: Any, settings: Any, steps: int) -> Any:
        runs.append((settings.precision, settings.fp8.format and settings.fp8.recipe, settings.moe.experts))
        bad = settings.fp8.format and settings.fp8.recipe == "blockwise"
        return [math.nan if bad else 5.0] * steps, [1.0] * steps, [0.5] * steps

    monkeypatch.setattr(script, "run", run)
    size = script.gpu_size()
    rows = [*script.check_fp8(size, HOPPER), *script.check_experts(size, HOPPER), *script.check_speed(size, HOPPER)]
    assert [(row.check, row.what, row.status) for row in rows] == [
        ("fp8", "delayed", "ok"),
        ("fp8", "tensorwise", "ok"),
        ("fp8", "blockwise", "FAILED"),
        ("fp8", "mxfp8", "skipped"),
        ("experts", "loss", "ok"),
        ("experts", "gradient norm", "ok"),
        ("speed", "dense", "told"),
        ("speed", "mixture", "told"),
    ]
    assert "needs compute capability 10.0" in rows[3].value
    assert runs[:3] == [("bf16", None, "auto"), ("bf16", "delayed", "auto"), ("bf16", "tensorwise", "auto")]
    assert ("bf16", None, "grouped") in runs and ("bf16", None, "sequential") in runs
    assert rows[-1].numbers["tokens_per_second"] == size.micro_batch_size * size.seq_length / 0.5


def test_a_check_that_breaks_and_one_without_time_are_told(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(size: Any, device: Any) -> Any:
        yield script.Row("one", "first", "", "ok")
        raise RuntimeError("no kernel")

    monkeypatch.setattr(script, "CHECKS", {"one": breaks, "two": lambda size, device: iter(())})
    rows = script.all_rows(script.cpu_size(), Device(None), time.monotonic() + 60)
    assert [(row.what, row.status) for row in rows] == [("first", "ok"), ("stopped", "FAILED")]
    rows = script.all_rows(script.cpu_size(), Device(None), time.monotonic() - 1)
    assert [(row.check, row.status) for row in rows] == [("one", "skipped"), ("two", "skipped")]


def test_the_data_can_be_learnt(script: Any) -> None:
    """A token has four successors, the same in every batch."""
    size = script.cpu_size()
    seen: dict[int, set[int]] = {}
    data = script.batches(size)
    for _ in range(40):
        batch = next(data)
        for token, label in zip(batch["tokens"].flatten().tolist(), batch["labels"].flatten().tolist()):
            seen.setdefault(token, set()).add(label)
    assert max(map(len, seen.values())) <= 4
    assert len(seen) > size.model.vocab_size / 2


@pytest.mark.slow
def test_its_code_runs_on_the_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_check.py", "--cpu-smoke", "--json", tmp_path / "facts.json"],
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "facts.json").read_text())["rows"]
    found = {(row["check"], row["what"]): row["status"] for row in rows}
    assert found["experts", "grouped"] == found["fp8", "delayed"] == "skipped"
    assert found["speed", "mixture"] == found["router", "top_k"] == "told"
