"""The table of a pipeline, the logs and what cancel does, from files and from what Slurm says."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from btx_nemo.errors import UserError
from btx_nemo.launch import cancel as cancelling
from btx_nemo.launch import slurm, state, status
from btx_nemo.launch.cancel import cancel
from btx_nemo.launch.logs import last_words, show_logs
from btx_nemo.launch.losses import losses
from btx_nemo.launch.state import Submitted, save_pipeline, save_submitted
from btx_nemo.launch.status import Row, rows, show_status
from btx_nemo.processes import started


@pytest.fixture
def pipeline(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stages in every state, as a pipeline on Slurm would leave them."""
    (runs / "state").mkdir()
    (runs / "logs").mkdir()
    names = ["expert-math", "expert-code", "expert-prose", "expert-law", "mix", "joint", "export"]
    save_pipeline(runs, {name: runs / name / "DONE" for name in names})
    for task, name in enumerate(names[:6]):
        after = {"mix": ["7_0", "7_1"], "joint": ["8"]}.get(name, [])
        job = {"mix": "8", "joint": "9"}.get(name, f"7_{task}")
        save_submitted(runs, name, Submitted(job=job, line=[], after=after, log=str(runs / "logs" / f"{name}.out")))
    for name, events in {
        "expert-math": "1\tstart\t7_0\t0\tnode1\n2\tdone\t7_0\t0\tnode1\n",
        "expert-code": "1\tstart\t7_1\t0\tnode2\n2\trequeue\t7_1\t0\tnode2\n3\tstart\t7_1\t1\tnode2\n",
        "expert-prose": "1\tstart\t7_2\t0\tnode1\n2\tfailed\t7_2\t0\tnode1\n",
        "expert-law": "1\tstart\t7_3\t0\tnode1\nhalf a li\n5\tstart",
        "router": "1\tstart\t44\t0\tnode9\n2\tstopped\t44\t0\tnode9\n",
    }.items():
        (runs / "state" / f"{name}.events").write_text(events)
    for name in ("expert-math", "expert-code"):
        (runs / name).mkdir()
    (runs / "expert-math" / "DONE").touch()
    lines = [{"step": 30, "loss": 2.5, "tokens_per_second": 400.0}, {"step": 30, "valid": {"math": 1.5}}]
    (runs / "expert-code" / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"step": 3')
    settings = "steps: 90\nglobal_batch_size: 4\ndata: {seq_length: 1000}\n"
    (runs / "expert-code" / "resolved.yaml").write_text(settings)
    reason = "btx-nemo train: /d/checkpoints: the disk or a quota is full"
    (runs / "logs" / "expert-prose.out").write_text(f"[btx] go\n{reason}\nE1129 torchrun's report\n[btx] failed\n")
    live = {
        "7_0": slurm.Live("COMPLETED", "node1", "0:00", "None"),
        "7_1": slurm.Live("RUNNING", "node2", "3:00:00", "None"),
        "7_2": slurm.Live("FAILED", "node1", "0:00", "NonZeroExitCode"),
        "8": slurm.Live("PENDING", "", "1:00", "Dependency"),
        "9": slurm.Live("CANCELLED", "", "1:00", "Dependency"),
    }
    monkeypatch.setattr(slurm, "has_slurm", lambda: True)
    monkeypatch.setattr(slurm, "jobs", lambda ids: {job: live[job] for job in ids if job in live})
    return runs


def test_a_row_for_every_stage(pipeline: Path) -> None:
    reason = "btx-nemo train: /d/checkpoints: the disk or a quota is full"
    assert rows(pipeline) == [
        Row(stage="expert-math", state="done", job="7_0", node="node1", restarts="0"),
        Row(
            stage="expert-code",
            state="running",
            job="7_1",
            node="node2",
            step="30/90",
            loss="2.500",
            speed="400",
            restarts="1",
            time_left="0:10:00",
        ),
        Row(stage="expert-prose", state="failed", job="7_2", node="node1", restarts="0", note=reason),
        Row(stage="expert-law", state="lost", job="7_3", node="node1", restarts="0"),
        Row(stage="mix", state="pending", job="8", note="Dependency"),
        Row(stage="joint", state="cancelled", job="9"),
        Row(stage="export", state="waiting"),
        Row(stage="router", state="stopped", job="44", node="node9", restarts="0"),
    ]


def test_printed_and_on_a_terminal(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_status(pipeline)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "stage" and len(lines) == 9
    assert lines[2].split() == ["expert-code", "running", "7_1", "node2", "30/90", "2.500", "400", "1", "0:10:00"]
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, width=200).print(status._table(rows(pipeline)))
    assert "time left" in screen.getvalue() and "\x1b[" in screen.getvalue()


def test_watching_ends_when_nothing_happens_any_more(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            monkeypatch.setattr(slurm, "jobs", lambda ids: {})

    monkeypatch.setattr(status.time, "sleep", pause)
    show_status(pipeline, watch=True)
    assert pauses == [2.0, 2.0]
    assert capsys.readouterr().out.count("expert-math") == 3


def test_nothing_was_submitted(runs: Path) -> None:
    for command in (show_status, lambda folder: show_logs(folder, None, lines=1, follow=False)):
        with pytest.raises(UserError, match="nothing was submitted there; give --runs DIR"):
            command(runs)


def test_logs(pipeline: Path, capfd: pytest.CaptureFixture[str]) -> None:
    show_logs(pipeline, "expert-prose", lines=2, follow=False)
    assert capfd.readouterr().out.splitlines() == ["E1129 torchrun's report", "[btx] failed"]
    show_logs(pipeline, None, lines=1, follow=False)
    assert f"expert-code: {pipeline}/logs/expert-code.out\n" in capfd.readouterr().out
    for stage, message in (
        ("nope", "no such stage; known: expert-math"),
        ("mix", "not there yet; job 8 has not started"),
        ("export", "was not submitted by btx-nemo"),
    ):
        with pytest.raises(UserError, match=message):
            show_logs(pipeline, stage, lines=1, follow=False)


def test_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == "no output"
    for text, expected in (
        ("", "no output"),
        ("[btx] a\n[btx] b\n", "[btx] b"),
        ("one\ntwo\n[btx] failed\n", "two"),
        ("mix.sh: expert missing\nmore\n", "mix.sh: expert missing"),
        ("x" * 100_000 + "\nbtx-nemo mix: no\n", "btx-nemo mix: no"),
    ):
        log.write_text(text)
        assert last_words(log) == expected


def test_cancel_takes_what_waits_for_it_along_and_last_ones_first(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cancelled: list[str] = []
    monkeypatch.setattr(slurm, "scancel", cancelled.extend)
    cancel(pipeline, ["expert-prose"])
    assert cancelled == [] and "nothing to cancel" in capsys.readouterr().out
    cancel(pipeline, ["expert-code"])
    assert cancelled == ["8", "7_1"]
    assert capsys.readouterr().out == "mix: cancelled job 8\nexpert-code: cancelled job 7_1\n"
    with pytest.raises(UserError, match="cancel: nope: no such stage; known: expert-math"):
        cancel(pipeline, ["nope"])


def test_cancel_knows_a_process_from_a_later_one_with_its_number(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(cancelling.os, "kill", lambda pid, number: killed.append(pid))
    (runs / "state").mkdir()
    save_pipeline(runs, {"seed": runs / "seed" / "DONE"})
    for ticks in ("1", started(os.getpid())):
        entry = Submitted(job="local", line=[], after=[], log="", pid=os.getpid(), started=ticks)
        save_submitted(runs, "seed", entry)
        assert killed == []
        cancel(runs, [])
    assert killed == [os.getpid()]


def test_damaged_state_is_told(runs: Path) -> None:
    (runs / "state").mkdir()
    (runs / "state" / "mix.job.json").write_text('{"job": "1"}')
    with pytest.raises(UserError, match="damaged; remove it after a look at squeue"):
        state.submitted(runs, "mix")


def test_losses_of_all_runs(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = pipeline / "eval"
    losses(pipeline, out)
    assert json.loads((out / "losses.json").read_text()) == {"expert-code": {"math": 1.5}}
    assert (out / "DONE").exists() and capsys.readouterr().out == "expert-code  math 1.5000\n"
    with pytest.raises(UserError, match="no run has measured a validation loss"):
        losses(pipeline / "logs", out)
