"""What `submit` puts into the queue, replaces there, joins and takes back; with a Slurm that runs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from btx_nemo.errors import BtxError, UserError
from btx_nemo.launch import batches, slurm, state
from btx_nemo.launch import submit as module
from btx_nemo.launch.cancel import cancel
from btx_nemo.launch.decide import Todo, decide, line
from btx_nemo.launch.state import Submitted, save_submitted
from btx_nemo.launch.status import rows
from btx_nemo.launch.submit import submit
from btx_nemo.processes import started

if TYPE_CHECKING:
    from conftest import Queue

WORDS = ("math", "until=mix")


def ids(runs: Path) -> dict[str, str]:
    """Stage -> recorded job."""
    paths = sorted((runs / "state").glob("*.job.json"))
    return {path.name.removesuffix(".job.json"): json.loads(path.read_text())["job"] for path in paths}


def forget(runs: Path) -> None:
    """As a `submit` leaves it that was killed before it could write."""
    for path in (runs / "state").glob("*.job.json"):
        path.unlink()


def finish(folder: Path) -> None:
    """As a finished expert."""
    (folder / "hf").mkdir(parents=True)
    (folder / "DONE").touch()


OTHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "data": (("data=/b",), (), "now BTX_DATA=/b, no longer BTX_DATA="),
    "seed": (("seed=/s",), (), "now BTX_SEED=/s, .*no longer BTX_SEED="),
    "restarts": (("max_restarts=0",), (), "now BTX_MAX_RESTARTS=0"),
    "options": ((), ("--comment=B",), "now --comment=B"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_pending_job_with_something_else_is_replaced_and_a_running_one_refused(
    what: str, runs: Path, queue: Queue
) -> None:
    words, options, difference = OTHERS[what]
    submit(WORDS, runs=runs)
    submit(WORDS, runs=runs)
    assert queue.jobs() == {"1": "PENDING", "2": "PENDING"}, "the same was not joined"
    submit([*WORDS, *words], runs=runs, sbatch_options=options)
    assert ids(runs) == {"expert-math": "3", "mix": "4"} and list(queue.jobs()) == ["3", "4"]
    queue.change("3", state="RUNNING")
    submit([*WORDS, *words], runs=runs, sbatch_options=options)
    with pytest.raises(
        UserError, match=r"expert-math is running as job 3, .* would replace it .*; wait for it, or stop"
    ):
        submit(WORDS, runs=runs)
    for job in ("3", "4"):
        queue.change(job, state="GONE")
    submit(WORDS, runs=runs)
    queue.change("5", state="RUNNING")
    with pytest.raises(UserError, match=difference):
        submit([*WORDS, *words], runs=runs, sbatch_options=options)


def test_what_sites_and_users_set_counts_too(runs: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(WORDS, runs=runs)
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    submit(WORDS, runs=runs)
    assert list(queue.jobs()) == ["3", "4"]


def test_a_seed_that_changes_under_a_running_expert_is_refused(runs: Path, queue: Queue) -> None:
    from btx_nemo.launch.identity import begin

    submit(WORDS, runs=runs)
    queue.change("1", state="RUNNING")
    out = runs / "expert-math"
    begin(runs, "expert-math", out, {"from": runs / "seed"}, ["--config-name=expert"])
    (out / "checkpoints").mkdir(parents=True)
    (runs / "state" / "expert-math.events").write_text(f"{int(time.time())}\tstart\t1\t0\tnode1\n")
    submit(WORDS, runs=runs)
    (runs / "seed" / "config.json").write_text('{"other": 1}')
    with pytest.raises(UserError, match=r"expert-math is running as job 1, .*it is made of another from"):
        submit(WORDS, runs=runs)
    # A start that has not recorded yet what it is made of.
    (runs / "state" / "expert-math.events").write_text(f"{int(time.time()) + 9}\tstart\t1\t1\tnode1\n")
    submit(WORDS, runs=runs)


def test_jobs_that_nobody_wrote_down_are_found_again(runs: Path, queue: Queue) -> None:
    words = ("math", "code", "until=mix")
    submit(words, runs=runs)
    before, records = ids(runs), {path.name: path.read_text() for path in (runs / "state").glob("*.job.json")}
    assert before == {"expert-math": "1_0", "expert-code": "1_1", "mix": "2"}
    forget(runs)
    submit(words, runs=runs, dry_run=True)
    assert not ids(runs)
    submit(words, runs=runs)
    assert {path.name: path.read_text() for path in (runs / "state").glob("*.job.json")} == records
    forget(runs)
    submit([*words, "data=/other"], runs=runs)
    assert list(queue.jobs()) == ["3_0", "3_1", "4"], "they were not replaced"
    forget(runs)
    queue.change("3_1", state="RUNNING")
    with pytest.raises(UserError, match=r"expert-code is running as job 3_1, .*which settings is not known"):
        submit(words, runs=runs)
    other = runs.parent / "others"
    submit(words, runs=other)
    assert len(queue.jobs()) == 6, "the jobs of another folder were taken"


def test_jobs_that_nobody_wrote_down_are_shown_and_cancelled(runs: Path, queue: Queue) -> None:
    submit(("math", "code", "until=mix"), runs=runs)
    forget(runs)
    assert [(row.stage, row.state, row.job) for row in rows(runs)] == [
        ("expert-math", "pending", "1_0"),
        ("expert-code", "pending", "1_1"),
        ("mix", "pending", "2"),
    ]
    assert not ids(runs), "a look must not write"
    cancel(runs, ["expert-code"])
    assert list(queue.jobs()) == ["1_0"]
    cancel(runs, [])
    assert not queue.jobs()


def test_the_printed_script_and_then_submit(runs: Path, queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("math", "code", "until=mix")
    submit(words, runs=runs, dry_run=True)
    printed = capsys.readouterr().out
    for _ in range(2):
        subprocess.run(["bash", "-c", printed], check=True, capture_output=True)
    with pytest.raises(UserError, match=r"jobs 1_0 and 3_0 both make expert-math in .*scancel 3_0"):
        submit(words, runs=runs)
    slurm.scancel(["3", "4"])
    submit(words, runs=runs)
    assert ids(runs) == {"expert-math": "1_0", "expert-code": "1_1", "mix": "2"}


def test_a_record_with_the_id_of_another_job(runs: Path, queue: Queue) -> None:
    """After Slurm was set up anew its ids begin again."""
    submit(WORDS, runs=runs)
    queue.change("1", name="somebody-else")
    submit(WORDS, runs=runs)
    assert ids(runs) == {"expert-math": "3", "mix": "4"}
    assert list(queue.jobs()) == ["1", "3", "4"]


def test_a_job_that_is_ending_is_waited_for(
    runs: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(WORDS, runs=runs)
    queue.change("1", state="COMPLETING")
    monkeypatch.setattr(module.time, "sleep", lambda _: queue.change("1", state="GONE"))
    submit(WORDS, runs=runs)
    assert "waiting for job 1 to end" in capsys.readouterr().err
    assert ids(runs) == {"expert-math": "3", "mix": "4"}
    queue.change("3", state="COMPLETING")
    monkeypatch.setattr(module, "ENDING_SECONDS", -1)
    with pytest.raises(BtxError, match="job 3 is still ending; submit again when squeue"):
        submit(WORDS, runs=runs)
    finish(runs / "expert-math")
    submit(WORDS, runs=runs)


def test_what_sbatch_refuses_leaves_all_as_it_was(runs: Path, queue: Queue) -> None:
    submit(WORDS, runs=runs)
    for job in ("1", "2"):
        queue.change(job, state="GONE")
    finish(runs / "expert-math")
    made = runs / "state" / "expert-math.made.json"
    made.write_text('{"inputs": {}, "settings": {}}')
    queue.set("refuse", "btx-mix")
    with pytest.raises(UserError, match=r"sbatch refused btx-mix: .*refused; nothing stays submitted"):
        submit(WORDS, runs=runs, redo=["expert-math"])
    assert (runs / "expert-math" / "DONE").exists() and made.read_text() == '{"inputs": {}, "settings": {}}'
    assert not queue.jobs() and ids(runs) == {"expert-math": "1", "mix": "2"}
    assert queue.calls("scancel") == ["scancel 3"]


def test_what_was_to_be_replaced_is_told_where_sbatch_refuses(runs: Path, queue: Queue) -> None:
    submit(WORDS, runs=runs)
    queue.set("refuse", "btx-mix")
    with pytest.raises(UserError, match="nothing stays submitted, and 1, 2, to be replaced, had been cancelled"):
        submit([*WORDS, "data=/b"], runs=runs)
    assert not queue.jobs() and ids(runs) == {"expert-math": "1", "mix": "2"}


def test_a_record_that_cannot_be_written(runs: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for error, raised in ((full, BtxError), (lambda *_: (_ for _ in ()).throw(KeyboardInterrupt), KeyboardInterrupt)):
        monkeypatch.setattr(batches, "_remember", error)
        with pytest.raises(raised):
            submit(WORDS, runs=runs)
        assert not queue.jobs() and not ids(runs)


@pytest.mark.parametrize("said", ["Welcome!\nYour job is in the queue", "", "Submitted ID"])
def test_an_answer_of_sbatch_that_is_no_id(said: str, runs: Path, queue: Queue) -> None:
    queue.set("say", said or "\t.")
    with pytest.raises(
        UserError, match=r"sbatch printed no job id for btx-expert-math, but .*; nothing stays submitted"
    ):
        submit(WORDS, runs=runs)
    assert not queue.jobs() and not ids(runs)


def test_an_answer_of_sbatch_after_a_banner(runs: Path, queue: Queue) -> None:
    queue.set("say", "** maintenance on Monday 12 **\nID;cluster")
    submit(WORDS, runs=runs)
    assert ids(runs) == {"expert-math": "1", "mix": "2"}


def test_an_error_of_the_clean_up_does_not_hide_the_cause(
    runs: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.set("refuse", "btx-mix")
    remember: Callable[..., None] = batches._remember

    def and_then_away(*arguments: object) -> None:
        remember(*arguments)
        queue.set("away", "Unable to contact slurm controller")

    monkeypatch.setattr(batches, "_remember", and_then_away)
    with pytest.raises(UserError, match=r"refused btx-mix.*Unable to contact.*these stay submitted: scancel 1"):
        submit(WORDS, runs=runs)
    assert ids(runs) == {"expert-math": "1"}, "the job that is still there was forgotten"


def test_a_controller_that_is_away_at_first(runs: Path, queue: Queue) -> None:
    queue.set("away", "Unable to contact slurm controller")
    with pytest.raises(BtxError, match=r"Slurm does not answer .*Unable to contact"):
        submit(WORDS, runs=runs)
    assert not queue.calls("sbatch") and not (runs / "state" / "pipeline.json").exists()


def test_dependencies_of_the_user_s_own(runs: Path, queue: Queue) -> None:
    submit(
        ["math", "code", "until=mix", "mix.sbatch=['--dep=afterok:9']"],
        runs=runs,
        sbatch_options=["--dependency=after:7"],
    )
    experts, mix = queue.calls("sbatch")
    assert "--dependency=after:7 " in experts
    assert "--dependency=afterok:1_0:1_1,afterok:9,after:7 --kill-on-invalid-dep=yes " in mix


def test_a_large_array_is_split(runs: Path, queue: Queue) -> None:
    queue.set("array", "2")
    submit(["a", "b", "c", "d", "e", "until=mix"], runs=runs)
    expected = {"a": "1_0", "b": "1_1", "c": "2_0", "d": "2_1", "e": "3"}
    assert ids(runs) == {f"expert-{domain}": job for domain, job in expected.items()} | {"mix": "4"}
    assert "--dependency=afterok:1_0:1_1:2_0:2_1:3 " in queue.calls("sbatch")[-1]


def test_a_process_of_this_machine_is_no_job_to_wait_for(
    runs: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "state").mkdir()
    lines: dict[str, list[str]] = {}

    def noted(jobs: Any, runs: Path, known: Any, live: Any, told: Any, redo: Any) -> list[Todo]:
        lines.update({job.name: line(job, told) for job in jobs})
        return decide(jobs, runs, known, live, told, redo)

    with monkeypatch.context() as patched:
        patched.setattr("btx_nemo.launch.submit.decide", noted)
        submit(WORDS, runs=runs, dry_run=True)
    for told, message in (
        (lines["expert-math"], "expert-math runs as a process of this machine; wait for it"),
        (["another"], "expert-math is running as job local"),
    ):
        entry = Submitted(job="local", line=told, after=[], log="", pid=os.getpid(), started=started(os.getpid()))
        save_submitted(runs, "expert-math", entry)
        with pytest.raises(UserError, match=message):
            submit(WORDS, runs=runs)
    assert not queue.calls("sbatch")


@pytest.mark.parametrize(("local", "linked"), [(False, False), (True, False), (False, True)])
def test_the_printed_script_makes_again_what_submit_would(
    local: bool, linked: bool, runs: Path, queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(["math", "until=experts"], runs=runs, local=True)
    before = (runs / "expert-math" / "starts.jsonl").read_text()
    if linked:
        (runs / "expert-math").rename(runs / "elsewhere")
        (runs / "expert-math").symlink_to("elsewhere")
    capsys.readouterr()
    submit(["math", "until=experts"], runs=runs, local=local, dry_run=True, redo=["expert-math"])
    subprocess.run(["bash", "-c", capsys.readouterr().out], check=True, capture_output=True)
    assert (runs / "stale" / "expert-math.1" / "starts.jsonl").read_text() == before
    assert (runs / "expert-math" / "DONE").exists() == local
    assert len(queue.calls("sbatch")) == (not local)


def test_the_printed_script_goes_on_where_experts_may_be_missing(
    runs: Path, queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["math", "code", "until=mix", "experts.math.set.fail=true"]
    submit(words, runs=runs, local=True, dry_run=True, allow_missing=True)
    printed = capsys.readouterr().out
    assert "export BTX_LOCAL=1" in printed
    ended = subprocess.run(["bash", "-c", printed], check=True, capture_output=True, text=True)
    assert "expert-math failed" in ended.stderr
    assert json.loads((runs / "mix" / "manifest.json").read_text())["missing"] == "[math]"


def test_long_names_are_refused(runs: Path, queue: Queue) -> None:
    for words in (["a" * 200], ["math", f"experts.math.stages.{'b' * 149}={{}}"]):
        with pytest.raises(UserError, match="characters; 150 are allowed, choose a shorter name"):
            submit(words, runs=runs)
    submit(["a" * 150, "until=mix"], runs=runs)
    assert state.submitted(runs, f"expert-{'a' * 150}") is not None


def test_another_order_of_experts_is_another_setting(runs: Path, queue: Queue) -> None:
    submit(["math", "code", "until=mix"], runs=runs, local=True)
    submit(["math", "code", "until=mix"], runs=runs)
    with pytest.raises(UserError, match="expert-math, expert-code, now in the order expert-code, expert-math; go back"):
        submit(["code", "math", "until=mix"], runs=runs)
    assert not queue.calls("sbatch")
