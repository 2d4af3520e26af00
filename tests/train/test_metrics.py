"""metrics.jsonl across kills and resumes, and the expert load as blocks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from btx_nemo.train.metrics import MetricsFile, TrainProgress, load_bars, routing_text
from btx_nemo.train.report import Report


def write(path: Path, *steps: int, end: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step, "loss": 1.5}) + "\n" for step in steps) + end)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_forgets_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, 2, 3, 4)
    MetricsFile(path, resumed_at=2).write({"step": 3, "loss": 0.5})
    assert steps(path) == [0, 1, 2, 2, 3]
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 3, "loss": 0.5}


def test_a_run_from_the_start_forgets_everything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    MetricsFile(path, resumed_at=0)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "damage",
    ['{"step": 2, "lo', '{"step": 2}', "\x00\x00\x00\n", "[1]\n", '{"loss": 1}\n', '{"step": "x"}\n', "\n"],
    ids=["cut", "no-end", "zeros", "a-list", "no-step", "no-number", "empty"],
)
def test_a_damaged_last_line_goes(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, end=damage)
    MetricsFile(path, resumed_at=2).write({"step": 3})
    assert steps(path) == [0, 1, 2, 3]


def test_bytes_that_are_no_text_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n")
    MetricsFile(path, resumed_at=1)
    assert steps(path) == [0, 1]


def test_nothing_is_lost_when_the_cutting_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, resumed_at=1)
    assert steps(path) == [0, 1, 2]


def test_bars_are_full_at_twice_the_fair_share() -> None:
    assert load_bars([[0.25, 0.25, 0.25, 0.25]]) == "▅▅▅▅"
    assert load_bars([[0.5, 0.5, 0.0, 0.0]]) == "██▁▁"
    assert load_bars([[1.0, 0.0, 0.0, 0.0]]) == "█▁▁▁"
    assert load_bars([[0.5, 0.5], [1.0, 0.0]]) == "▅▅ █▁"


def test_bars_of_a_deep_model_are_cut() -> None:
    assert load_bars([[0.5, 0.5]] * 3, width=2) == "▅▅ ▅▅ …"
    assert load_bars([[0.5, 0.5]] * 2, width=2) == "▅▅ ▅▅"


def test_bars_grow_with_the_share() -> None:
    heights = [load_bars([[share, 1 - share]])[0] for share in (0.0, 0.15, 0.3, 0.45, 0.6, 0.9)]
    assert heights == sorted(heights)
    assert len(set(heights)) == len(heights)


def test_without_a_terminal_there_are_sparse_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainProgress(total=5, done=0, name="math", tokens_per_step=10, show=True, every=2) as bar:
        for step in range(1, 6):
            bar.update(step, "loss 1.0")
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("  ")[0] for line in err.splitlines()] == ["math 2/5", "math 4/5", "math 5/5"]


def test_only_the_first_rank_shows(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainProgress(total=1, done=0, name="math", tokens_per_step=10, show=False, every=1) as bar:
        bar.update(1, "loss 1.0")
        bar.say("validation")
    assert capsys.readouterr() == ("", "")


def test_routing_in_a_few_words() -> None:
    load, entropy = [[0.5, 0.5, 0, 0], [0.25] * 4], [0.0, math.log(4)]
    assert routing_text(load, entropy, [0.0, 0.0], 0) == f"load {load_bars(load)}  entropy 50%"
    assert routing_text(load, entropy, [0.1, 0.0], 2).endswith("entropy 50%  dropped 5.0%  dead 2")
    assert routing_text([[0.0] * 4, load[1]], [0.0, math.log(4)], [0.0, 0.1], 0) == (
        f"load {load_bars(load[1:])}  entropy 100%  dropped 10.0%"
    )
    assert routing_text([[1.0]], [0.0], [0.0], 0).endswith("entropy 0%")


def test_a_validation_loss_that_is_no_number_is_pointed_out() -> None:
    lines: list[str] = []
    report = cast(Report, SimpleNamespace(first=False, say=lines.append))
    Report.validation(report, 3, {"valid": {"math": 1.0}})
    Report.validation(report, 4, {"valid": {"math": 1.0, "code": math.nan}})
    assert len(lines) == 3 and lines[-1].startswith("warning: step 4: a validation loss is not finite")
