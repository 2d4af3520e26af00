"""The job scripts and `submit` under a real Slurm, with a stand-in for the command: what starts, and what not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from btx_testing.slurm import REPO, User, wait_for

pytestmark = pytest.mark.slurm
IN_ADVANCE = ("pipeline_here", "pipeline_on_nodes")

STAGES = ["expert-math", "expert-code", "expert-prose", "mix", "joint", "export", "eval"]
DOMAINS = ("math", "code", "prose")


def test_experts_in_parallel_then_mix_then_training_then_export(user: User) -> None:
    arguments = (*DOMAINS, "expert.set.steps=40", "+expert.set.meet=3", "joint.set.steps=3", "joint.nodes=2")
    ids = user.submit(*arguments)
    assert list(ids) == STAGES
    array = ids["expert-math"].partition("_")[0]
    assert [ids[f"expert-{d}"] for d in DOMAINS] == [f"{array}_{task}" for task in range(3)], "not one array"
    joined = user.submit(*arguments)
    assert joined == ids, "what runs was not joined"
    assert user.wait_end(*ids.values()) == ["COMPLETED"] * 7

    runs, (math, code, prose) = user.runs, (user.starts(f"expert-{d}")[0] for d in DOMAINS)
    experts, (joint,) = [math, code, prose], user.starts("joint")
    assert max(e["begin"] for e in experts) < min(e["end"] for e in experts), "the experts did not run side by side"
    assert joint["begin"] > max(e["end"] for e in experts)
    own = ["domain=math", f"out='{runs}/expert-math'", "export=true"]
    assert math["argv"] == ["train", "--config-name=expert", *own, "steps=40", "meet=3"]
    assert joint["argv"][:3] == ["train", "--config-name=mix", f"init_from='{runs}/mix'"]
    mix = json.loads((runs / "mix" / "manifest.json").read_text())
    assert mix["seed"] == f"{runs}/seed"
    assert {k: v for k, v in mix.items() if k.startswith("experts.")} == {
        f"experts.{d}": f"{runs}/expert-{d}/hf" for d in DOMAINS
    }
    assert json.loads((runs / "export" / "manifest.json").read_text())["in"] == f"{runs}/joint"
    assert json.loads((runs / "eval" / "losses.json").read_text())["joint"] == {"math": 0.5}
    assert "2 node(s) x 2 rank(s), meeting at node1:" in user.log("joint")

    assert set(user.submit(*arguments).values()) == {"done"}
    table = [line.split() for line in user.btx("status").splitlines()]
    assert [row[:3] for row in table[1:]] == [[stage, "done", ids[stage]] for stage in STAGES]
    assert table[1][4:7] == ["40/40", "0.025", "2,000"]


def test_the_printed_script_submits_the_same(user: User) -> None:
    script = user.btx("submit", "math", "code", "until=export", "--dry-run")
    assert not (user.runs / "logs").exists() and not (user.runs / "state").exists()
    ids = [line.split()[1] for line in user.run("bash", "-c", script).splitlines()]
    assert len(ids) == 4
    assert user.wait_end(*ids) == ["COMPLETED"] * 4
    assert (user.runs / "export").exists()


def test_a_stop_of_one_task_leaves_the_rest_of_its_array_alone(user: User) -> None:
    """The id of one task is that of the whole array: a signal or a requeue by it would reach them all."""
    ids = user.submit("math", "code", "until=experts", "expert.set.steps=80")
    for domain in ("math", "code"):
        user.wait_step(f"expert-{domain}", 3)
    for stage in ids:
        owner = user.job(ids[stage])
        if owner["JobId"] == owner["ArrayJobId"]:
            user.stop_soon(ids[stage])
            stopped = stage
    (other,) = set(ids) - {stopped}
    assert user.wait_end(*ids.values()) == ["COMPLETED"] * 2
    assert len(user.starts(stopped)) == 2 and len(user.starts(other)) == 1
    rows = {line.split()[0]: line.split() for line in user.btx("status").splitlines()}
    assert (rows[stopped][7], rows[other][7]) == ("1", "0"), "the restarts in the table"


def test_requeues_are_bounded(user: User) -> None:
    ids = user.submit("math", "until=experts", "expert.set.steps=600", "max_restarts=0")
    user.wait_step("expert-math", 1)
    user.stop_soon(ids["expert-math"])
    assert user.wait_end(*ids.values()) == ["FAILED"]
    assert user.job(ids["expert-math"])["ExitCode"] == "75:0"
    assert user.job(ids["expert-math"])["Restarts"] == "0"
    assert user.btx("status").splitlines()[1].split()[1] == "stopped"


def test_a_crash_is_requeued_when_asked_and_a_mistake_is_not(user: User) -> None:
    """BTX_REQUEUE_ON_FAILURE, by the pipeline's setting: bounded, and not for wrong input (exit code 2)."""
    common = ("requeue_on_failure=true", "max_restarts=1", "until=experts", "expert.set.steps=2")
    ids = user.submit("math", *common, "expert.set.fail=true")
    assert user.wait_end(*ids.values()) == ["FAILED"]
    assert user.job(ids["expert-math"])["Restarts"] == "1"
    assert len(user.starts("expert-math")) == 2
    refused = user.having(BTX_REQUEUE_ON_FAILURE="1").sbatch("mix.sh", "code")
    assert user.wait_end(refused) == ["FAILED"]
    assert user.job(refused)["Restarts"] == "0"


def test_a_failed_expert_stops_its_branch_alone_and_is_redone(user: User) -> None:
    bad = "experts.math.set.fail=true"
    words = ("math", "code", "until=export", "experts.code.set.steps=20")
    ids = user.submit(*words, bad)
    assert user.wait_end(*ids.values()) == ["FAILED", "COMPLETED", *["CANCELLED"] * 3]
    assert not (user.runs / "mix").exists()
    rows = {line.split()[0]: line.split()[1] for line in user.btx("status").splitlines()[1:]}
    assert rows == {"expert-math": "failed", "expert-code": "done"} | dict.fromkeys(STAGES[3:-1], "cancelled")
    refusal = user.btx("submit", *words, code=2)
    assert "was made with fail=true, now unset" in refusal and "--redo expert-math" in refusal
    again = user.submit(*words, "--redo", "expert-math")
    assert again["expert-code"] == "done"
    assert user.wait_end(*(again[stage] for stage in again if again[stage] != "done")) == ["COMPLETED"] * 4


def test_the_mix_can_go_on_without_a_failed_expert_and_says_so(user: User) -> None:
    words = ("math", "code", "prose", "until=train")
    ids = user.submit(*words, "experts.prose.set.fail=true", "--allow-missing")
    assert user.wait_end(*ids.values()) == ["COMPLETED"] * 2 + ["FAILED"] + ["COMPLETED"] * 2
    manifest = json.loads((user.runs / "mix" / "manifest.json").read_text())
    assert manifest["missing"] == "[prose]" and "experts.prose" not in manifest
    assert "expert prose is not finished: the mix goes on without it" in user.log("mix")
    # Later it comes out well: the mix is made again, with it.
    whole = user.submit(*words, "--redo", "expert-prose")
    assert (whole["expert-math"], whole["expert-code"]) == ("done", "done")
    assert user.wait_end(*(whole[s] for s in STAGES[2:5])) == ["COMPLETED"] * 3
    assert "experts.prose" in json.loads((user.runs / "mix" / "manifest.json").read_text())


def test_a_pending_job_is_replaced_and_a_running_one_is_not(user: User) -> None:
    words = ("math", "expert.set.steps=400", "until=mix")
    ids = user.submit(*words)
    user.wait_step("expert-math", 1)
    for path in (user.runs / "state").glob("*.job.json"):  # as after a `submit` that was killed before it wrote them
        path.unlink()
    assert user.submit(*words) == ids
    other = user.submit(*words, "mix.set.top_k=1")
    assert other["expert-math"] == ids["expert-math"] and other["mix"] != ids["mix"]
    assert user.job(ids["mix"])["JobState"] == "CANCELLED"
    assert "expert-math is running as job" in user.btx("submit", *words, "expert.nodes=2", code=2)
    user.btx("cancel", "expert-math")
    assert user.wait_end(ids["expert-math"], other["mix"]) == ["CANCELLED", "CANCELLED"]
    assert "nothing to cancel" in user.btx("cancel")


def test_what_must_not_start_does_not(user: User) -> None:
    """Slurm takes `afterok` on a job it does not know, mistyped or long forgotten, as satisfied: the script looks."""
    (user.runs / "expert-math" / "hf").mkdir(parents=True)
    jobs = {
        "expert-math/DONE is missing": user.sbatch("mix.sh", "math", options="--dependency=afterok:99999"),
        "/mix is missing": user.sbatch("train_mix.sh", options="--dependency=afterok:99998"),
        "mix is missing: the mixture is not assembled": user.sbatch("train_router.sh"),
        "joint/DONE is missing": user.sbatch("export.sh"),
        "router/DONE is missing": user.sbatch("eval.sh", "router"),
        "no expert is finished": user.sbatch("mix.sh", "code", "--allow-missing"),
    }
    assert user.wait_end(*jobs.values()) == ["FAILED"] * len(jobs)
    for message, job in jobs.items():
        assert user.job(job)["ExitCode"] == "2:0"
        name = user.job(job)["JobName"]
        assert message in (user.cwd / f"{name}_{job}.out").read_text()
    assert {path.name for path in user.runs.iterdir()} == {"seed", "state", "expert-math"}


def test_bad_domains_are_refused_and_nothing_runs(user: User) -> None:
    domains = ["a/b", "a b", "$(touch x)", "../x", "`touch x`", "", "-x", "A", "math.$(touch x)", "math.", "a.b.c"]
    cases = [(script, d) for script in ("train_expert.sh", "mix.sh") for d in domains]
    ids = [user.sbatch(script, d) for script, d in cases]
    assert user.wait_end(*ids) == ["FAILED"] * len(ids)
    assert {user.job(i)["ExitCode"] for i in ids} == {"2:0"}
    assert not list(user.cwd.rglob("x")) and not list(user.runs.glob("expert-*"))


def test_scripts_are_found_where_they_were_submitted_from(user: User) -> None:
    copy = user.cwd / "my repo" / "slurm"
    shutil.copytree(REPO / "slurm", copy)
    job = user.run("sbatch", "--parsable", copy / "train_expert.sh", "math", "note=a b")
    assert user.wait_end(job) == ["COMPLETED"]
    assert user.starts("expert-math")[0]["argv"][-1] == "note=a b"


def test_two_jobs_on_one_node_meet_at_different_ports(user: User) -> None:
    ids = [user.sbatch("train_expert.sh", d, options="--nodelist=node1") for d in ("math", "code")]
    assert user.wait_end(*ids) == ["COMPLETED"] * 2
    logs = [(user.cwd / f"btx-expert_{i}.out").read_text() for i in ids]
    ports = {re.search(r"meeting at localhost:(\d+)", log)[1] for log in logs}  # type: ignore[index]
    assert len(ports) == 2


def test_stages_of_an_expert_follow_each_other(user: User) -> None:
    (user.cwd / "conf").mkdir()
    (user.cwd / "conf" / "mine.yaml").write_text(
        "runs: ${oc.env:BTX_RUNS}\nuntil: experts\nexpert: {set: {steps: 3}}\n"
        "experts:\n  math: {nodes: 2, stages: {mid: {}, sft: {set: {lr: 5e-5}}}}\n  code: {}\n"
    )
    ids = user.submit("--config-path=conf", "--config-name=mine")
    assert list(ids) == ["expert-math.mid", "expert-math.sft", "expert-math", "expert-code"]
    assert user.wait_end(*ids.values()) == ["COMPLETED"] * 4
    starts = [user.starts(stage)[0] for stage in list(ids)[:3]]
    assert starts[0]["end"] < starts[1]["begin"] and starts[1]["end"] < starts[2]["begin"]
    assert f"init_from='{user.runs}/expert-math.mid/hf'" in starts[1]["argv"] and "lr=5e-05" in starts[1]["argv"]
    assert "2 node(s)" in user.log("expert-math") and "1 node(s)" in user.log("expert-math.mid")


def test_settings_are_checked_before_anything_is_queued(user: User) -> None:
    del user.env["BTX_CLI"]
    refusal = user.btx("submit", *DOMAINS, "experts.code.set.stepz=3", code=2)
    assert "expert-code: train/expert.yaml: unknown key stepz; known:" in refusal
    assert not list(user.runs.glob("state/*.job.json"))


def test_the_cluster_goes_with_the_process_it_was_started_for(tmp_path: Path) -> None:
    """As after a Ctrl-C, or a SIGKILL of the tests."""
    import subprocess
    import tempfile

    from btx_testing.slurm import INSTALL, MISSING, TOOL, plain_environment

    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)}: {INSTALL}")
    folder = Path(tempfile.mkdtemp(prefix="btx_slurm_", dir="/tmp"))
    owner = subprocess.Popen(["sleep", "600"])
    environment = plain_environment()
    subprocess.run([str(TOOL), "start", str(folder), str(owner.pid)], env=environment, check=True, timeout=120)
    pids = [int(path.read_text()) for path in (folder / "pid").iterdir()]
    owner.kill()
    owner.wait()
    wait_for(lambda: not folder.exists(), "the end of the cluster")
    assert len(pids) == 5
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of its daemons")
