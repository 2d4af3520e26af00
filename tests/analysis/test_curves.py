"""Curves of runs: what is drawn is what metrics.jsonl holds, and a mistake is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from btx_testing.commands import CommandServer

from btx_nemo.analysis.curves import by_name, curves, plot, read_metrics, series

RECORDS = [
    {"step": 0, "valid": {"math": 3.0, "code": 4.0}, "routing": {}},
    {"step": 1, "loss": 2.5, "grad_norm": 1.0, "tokens_per_second": 10.0},
    {"step": 2, "loss": 2.0, "grad_norm": 0.5, "tokens_per_second": 11.0, "flops_utilization": None},
    {"step": 2, "valid": {"math": 2.0, "code": 3.0}},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    lines = [*map(json.dumps, RECORDS), "[1]", '{"step": 3, "lo']
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
    return tmp_path / "run"


def test_what_is_read(run: Path) -> None:
    records = read_metrics(run)
    assert records == RECORDS
    assert series(records, "loss") == ([1, 2], [2.5, 2.0])
    assert by_name(records, "valid") == {"math": ([0, 2], [3.0, 2.0]), "code": ([0, 2], [4.0, 3.0])}


def test_what_has_a_curve() -> None:
    """Nothing without values, a mean over layers of what is by layer, and a step that was skipped has a gap."""
    records = [
        {"step": 1, "loss": None, "flops_utilization": None, "domain_loss": {"math": 1.0, "code": None}},
        {"step": 2, "loss": 2.0, "router_losses": {"btx": [1.0, 3.0]}, "expert_load": [[0.5, 0.5]]},
    ]
    assert curves(records) == {
        "training loss": ([2], [2.0]),
        "training loss by domain, math": ([1], [1.0]),
        "router loss, btx": ([2], [2.0]),
    }


def test_the_command(commands: CommandServer, run: Path, tmp_path: Path) -> None:
    import matplotlib.image

    other = tmp_path / "again" / "run"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text(json.dumps(RECORDS[1]) + "\n")
    ended = commands.run("plot", run, other, "--out", tmp_path / "curves.png")
    assert ended.code == 0 and str(other) in ended.out
    assert matplotlib.image.imread(tmp_path / "curves.png").shape[:2] == (720, 1512)  # five panels on two rows


def test_mistakes(commands: CommandServer, run: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([tmp_path], "no metrics.jsonl"),
        ([run, "--out", tmp_path / "x.txt"], "must end in .png, .svg or .pdf"),
        ([run, "--out", tmp_path / "no" / "x.png"], "no folder"),
    ):
        ended = commands.run("plot", *arguments)
        assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1
    (run / "metrics.jsonl").write_text("")
    assert "holds no record yet" in commands.run("plot", run).err
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null, "valid": [1], "router_losses": {"btx": [null, 1]}}')
    ended = commands.run("plot", run)
    assert ended.code == 2 and "holds no number to draw" in ended.err and ended.err.count("\n") == 1


def test_what_cannot_be_drawn_is_left_out(commands: CommandServer, run: Path, tmp_path: Path) -> None:
    lines = [
        "[" * 200_000,
        f'{{"step": {"9" * 400}, "loss": 1}}',
        '{"step": 1e308, "loss": 1}',
        f'{{"step": 1, "loss": {"9" * 400}, "grad_norm": 1e308, "lr": true, "tokens_per_second": NaN}}',
        '{"step": 2, "loss": 2.0, "grad_norm": -1e308, "domain_loss": {"$x^{$": 1e39},'
        ' "router_losses": {"btx": [1e308]}}',
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    assert curves(read_metrics(run)) == {"training loss": ([2], [2.0]), "training loss by domain, $x^{$": ([2], [1e39])}
    ended = commands.run("plot", run, "--out", tmp_path / "curves.png")
    assert ended.code == 0 and (tmp_path / "curves.png").is_file(), ended.err


def test_curves_beyond_the_most_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("btx_nemo.analysis.curves.MOST_CURVES", 2)
    record = {"step": 1, "loss": 1.0, "valid": {f"d{number:03}": 1.0 for number in range(400)}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    plot([tmp_path], tmp_path / "curves.png")
    assert "left out: 399 of 401 curves, from 'validation loss, d001' on" in capsys.readouterr().out
