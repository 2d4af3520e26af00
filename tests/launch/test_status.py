"""The table of a pipeline, the logs and what cancel does, from files and from what Slurm says."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from btx_nemo.errors import UserError
from btx_nemo.launch import cancel as cancelling
from btx_nemo.launch import slurm, state, status
from btx_nemo.launch.cancel import cancel
from btx_nemo.launch.identity import made_path
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
    monkeypatch.setattr(slurm, "absent", lambda: "")
    monkeypatch.setattr(slurm, "named", lambda names: [])
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
    Console(file=screen, force_terminal=True, width=200).print(status._table(rows(pipeline), 200))
    assert "time left" in screen.getvalue() and "\x1b[" in screen.getvalue()


@pytest.mark.parametrize(("width", "columns"), [(200, 10), (80, 6), (40, 3), (24, 2)])
def test_a_narrow_terminal_shows_what_matters_whole(pipeline: Path, width: int, columns: int) -> None:
    screen = io.StringIO()
    Console(file=screen, width=width).print(status._table(rows(pipeline), width))
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    heads = re.sub("time left", "time_left", lines[0]).split()
    assert len(heads) >= columns and heads[:2] == ["stage", "state"] and max(map(len, lines)) <= width
    for row in rows(pipeline):
        (line,) = (line for line in lines if line.startswith(f"{row.stage} "))
        assert line.split()[1] == row.state and (columns == 2 or row.step in line)


def test_on_the_narrowest_one_stage_and_state_are_folded(pipeline: Path) -> None:
    screen = io.StringIO()
    Console(file=screen, width=20).print(status._table(rows(pipeline), 20))
    text = screen.getvalue()
    assert all(state in text for state in ("state", "running", "cancelled", "expert-pro")) and "…" not in text


@pytest.mark.parametrize(
    ("line", "step", "loss"),
    [
        ('{"step": 31, "loss": null, "tokens_per_second": null}', "31/90", ""),
        ('{"step": 31, "loss": NaN, "tokens_per_second": Infinity}', "31/90", ""),
        (f'{{"step": 31, "loss": 1{"0" * 400}, "tokens_per_second": "fast"}}', "31/90", ""),
        ('{"step": true, "loss": 1}', "30/90", "2.500"),
        ('{"step": 31.5, "loss": [1]}', "30/90", "2.500"),
        ("[" * 5000, "30/90", "2.500"),
        ("\x00\xff", "30/90", "2.500"),
        ('{"step": 100, "loss": 1.0, "tokens_per_second": 1e-300}', "100/90", "1.000"),
    ],
)
def test_a_damaged_line_of_metrics(pipeline: Path, line: str, step: str, loss: str) -> None:
    with (pipeline / "expert-code" / "metrics.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    row = rows(pipeline)[1]
    assert (row.state, row.step, row.loss) == ("running", step, loss)


def test_a_stage_that_waits_to_be_made_again_is_not_done(pipeline: Path) -> None:
    (pipeline / "mix").mkdir()
    (pipeline / "mix" / "DONE").touch()
    old = "1\tstart\t3\t0\tnode1\n2\tstart\t3\t1\tnode1\n3\tdone\t3\t1\tnode1\n"
    (pipeline / "state" / "mix.events").write_text(old)
    mix = next(row for row in rows(pipeline) if row.stage == "mix")
    assert mix == Row(stage="mix", state="pending", job="8", note="Dependency"), "what an old job did is its own"


def test_stages_of_an_earlier_graph_are_shown_and_cancelled(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live = {job: slurm.Live("PENDING", "", "", "") for job in ("7_1", "8", "9", "10")}
    monkeypatch.setattr(slurm, "jobs", lambda ids: {job: live[job] for job in ids if job in live})
    save_submitted(pipeline, "export", Submitted(job="10", line=[], after=["9"], log=""))
    save_pipeline(pipeline, {name: pipeline / name / "DONE" for name in ("expert-math", "expert-code")})
    names = [row.stage for row in rows(pipeline)]
    assert names[:2] == ["expert-math", "expert-code"] and {"mix", "joint", "export", "expert-law"} <= {*names}
    cancelled: list[str] = []
    monkeypatch.setattr(slurm, "scancel", cancelled.extend)
    cancel(pipeline, ["expert-code"])
    assert cancelled == ["10", "9", "8", "7_1"]
    cancel(pipeline, ["joint"])
    assert cancelled[4:] == ["10", "9"]
    capsys.readouterr()


def test_what_others_write_does_not_steer_the_terminal(pipeline: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b[2Jone\x1b]0;title\x07 two\x9b31m\x00\r\n"
    (pipeline / "logs" / "expert-prose.out").write_text(bad)
    (pipeline / "state" / "router.events").write_text("1\tstart\t44\t0\tno\x1b[31mde\n")
    (pipeline / "state" / "\x1b[2J.events").write_text("1\tstart\t44\t0\tnode\n")
    show_status(pipeline)
    show_logs(pipeline, "expert-prose", lines=5, follow=False)
    out = capfd.readouterr().out
    assert "one two" in out and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|2J|title", out)


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


def test_a_process_that_had_ended_before_it_was_looked_at(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "state").mkdir()
    save_submitted(runs, "seed", Submitted(job="local", line=[], after=[], log="", pid=2**22 + 1, started=""))
    assert rows(runs)[0].state == "lost"
    cancel(runs, [])
    assert "nothing to cancel" in capsys.readouterr().out
    save_submitted(runs, "seed", Submitted(job="local", line=[], after=[], log="", pid=2**22 + 1, started="5"))
    monkeypatch.setattr(state, "started", lambda pid: "5")
    cancel(runs, [])  # it ends between the look and the signal


def test_watching_ends_for_what_was_killed_by_hand(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "state").mkdir()
    (runs / "state" / "expert-math.events").write_text("1\tstart\tlocal\t0\tnode\n")
    show_status(runs, watch=True)
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["expert-math", "unknown"]


SOUND = {"job": "1", "line": [], "after": [], "log": "x"}


@pytest.mark.parametrize(
    "values",
    [
        *([], {"job": "1"}, SOUND | {"job": 12}, SOUND | {"log": None}, SOUND | {"pid": "a"}, SOUND | {"pid": -1}),
        *(SOUND | {"pid": True}, SOUND | {"started": 5}, SOUND | {"after": "12"}, SOUND | {"line": [1]}),
        *(SOUND | {"job": "--user=me"}, SOUND | {"log": "a\0b"}, SOUND | {"more": 1}),
    ],
)
def test_damaged_state_is_told(values: object, runs: Path) -> None:
    (runs / "state").mkdir()
    (runs / "state" / "mix.job.json").write_text(json.dumps(values))
    for command in (lambda: show_status(runs), lambda: cancel(runs, []), lambda: state.submitted(runs, "mix")):
        with pytest.raises(UserError, match=r"mix\.job\.json: damaged; remove it, and btx-nemo forgets the job of mix"):
            command()
    (runs / "state" / "pipeline.json").write_text(json.dumps(values if isinstance(values, list) else {"a": 1}))
    if values:
        with pytest.raises(UserError, match=r"pipeline\.json: damaged; remove it"):
            show_status(runs)


def test_the_lock_is_no_way_to_another_file(runs: Path) -> None:
    (runs / "precious").write_text("text")
    (runs / "state").mkdir()
    (runs / "state" / ".lock").symlink_to(runs / "precious")
    with pytest.raises(UserError, match=r"\.lock: cannot be opened"), state.submitting(runs):
        pass
    assert (runs / "precious").read_text() == "text"
    (runs / "state" / ".lock").unlink()
    with state.submitting(runs), pytest.raises(UserError, match="another btx-nemo submit"), state.submitting(runs):
        pass


def test_losses_of_all_runs(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = pipeline / "eval"
    losses(pipeline, out)
    assert json.loads((out / "losses.json").read_text()) == {"expert-code": {"math": 1.5}}
    assert (out / "DONE").exists() and capsys.readouterr().out == "expert-code  math 1.5000\n"
    with pytest.raises(UserError, match="no run has measured a validation loss"):
        losses(pipeline / "logs", out)
    made_path(pipeline, "mix").write_text('{"inputs": {"expert-math": null}, "settings": {}}')
    with pytest.raises(UserError, match="no run has measured a validation loss"):
        losses(pipeline, out)
