"""The job scripts under a real Slurm: the chain, the stop before the time limit, and what must not start."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
MISSING = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name, path=SEARCH) is None]
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: {INSTALL}"),
]

Submit = Callable[..., str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """SLURM_CONF of a throw-away cluster; its folder is short because unix sockets lie below it."""
    folder = tempfile.mkdtemp(prefix="btx_slurm_", dir="/tmp")
    tool = str(HERE / "local_cluster.sh")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    started = subprocess.run([tool, "start", folder], env=clean, capture_output=True, text=True, timeout=60)
    assert started.returncode == 0, started.stderr
    yield started.stdout.strip()
    subprocess.run([tool, "stop", folder], env=clean, check=True, timeout=60)
    shutil.rmtree(folder)


@pytest.fixture
def env(cluster: str, tmp_path: Path) -> dict[str, str]:
    """An environment as a user of that cluster has it, with the stand-in for the command and two GPUs a job."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_", "BTX_"))}
    runs = tmp_path / "my runs"
    (runs / "seed").mkdir(parents=True)
    (runs / "seed" / "config.json").write_text("{}")
    return clean | {
        "SLURM_CONF": cluster,
        "BTX_RUNS": str(runs),
        "BTX_CLI": str(HERE / "fake_btx.py"),
        "SBATCH_GRES": "gpu:2",
        "PYTHONPATH": str(REPO),
    }


def run(command: list[str], env: dict[str, str], cwd: Path) -> str:
    result = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout.strip()


def sbatch(env: dict[str, str], cwd: Path, *arguments: str, script: str = "train_expert.sh", options: str = "") -> str:
    return run(["sbatch", "--parsable", *options.split(), str(REPO / "slurm" / script), *arguments], env, cwd)


def job(env: dict[str, str], job_id: str) -> dict[str, str]:
    shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job_id], env=env, capture_output=True, text=True)
    return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {seconds} s"
        time.sleep(0.1)


def wait_end(env: dict[str, str], *ids: str) -> list[str]:
    """The final states, in order. A requeued job is on its way again, not at its end."""
    final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    wait_for(lambda: all(job(env, i).get("JobState") in final for i in ids), f"the end of {ids}")
    return [job(env, i)["JobState"] for i in ids]


def starts(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]


def wait_step(run_dir: Path, step: int) -> None:
    latest = run_dir / "latest"
    wait_for(lambda: latest.exists() and int(latest.read_text()) >= step, f"step {step} of {run_dir.name}")


def submit(env: dict[str, str], cwd: Path, arguments: str) -> dict[str, str]:
    """Calls the real `submit` and reads its table: name -> job id."""
    code = f"from btx_nemo.launch.submit import submit; submit({arguments})"
    lines = run([sys.executable, "-c", code], env, cwd).splitlines()
    return {name: job_id for name, job_id, *_ in (line.split() for line in lines)}


def test_experts_in_parallel_then_mix_then_export(env: dict[str, str], tmp_path: Path) -> None:
    runs = Path(env["BTX_RUNS"])
    arguments = "['math', 'code', 'prose'], overrides=['expert:steps=40', 'mix:steps=3', 'lr=1']"
    ids = submit(env, tmp_path, arguments)
    assert list(ids) == ["btx-expert-math", "btx-expert-code", "btx-expert-prose", "btx-mix", "btx-export"]
    assert wait_end(env, *ids.values()) == ["COMPLETED"] * 5

    experts = [starts(runs / f"expert-{d}")[0] for d in ("math", "code", "prose")]
    joint = starts(runs / "joint")[0]
    assert max(e["begin"] for e in experts) < min(e["end"] for e in experts), "the experts did not run side by side"
    assert joint["begin"] > max(e["end"] for e in experts)
    out = f"out='{runs}/expert-math'"
    expected = ["train", "--config-name", "expert", "domain=math", out, "export=true", "steps=40", "lr=1"]
    assert experts[0]["argv"] == expected
    mix = json.loads((runs / "mix" / "config.json").read_text())
    assert mix["seed"] == f"{runs}/seed"
    assert [k for k in mix if k.startswith("experts.")] == ["experts.math", "experts.code", "experts.prose"]
    assert all(mix[f"experts.{d}"] == f"{runs}/expert-{d}/hf" for d in ("math", "code", "prose"))
    assert joint["argv"][:4] == ["train", "--config-name", "mix", f"init_from='{runs}/mix'"]
    assert json.loads((runs / "export" / "config.json").read_text())["in"] == f"{runs}/joint"
    for name, job_id in ids.items():
        assert (runs / "logs" / f"{name}_{job_id}.out").stat().st_size > 0
    assert submit(env, tmp_path, arguments)["nothing"] == "to", "a finished pipeline was submitted again"


def test_the_printed_script_submits_the_same(env: dict[str, str], tmp_path: Path) -> None:
    code = "from btx_nemo.launch.submit import submit; submit(['math'], dry_run=True)"
    script = run([sys.executable, "-c", code], env, tmp_path)
    assert not (Path(env["BTX_RUNS"]) / "logs").exists()
    ids = [line.split()[1] for line in run(["bash", "-c", script], env, tmp_path).splitlines()]
    assert len(ids) == 3
    assert wait_end(env, *ids) == ["COMPLETED"] * 3


def test_a_stop_before_the_limit_saves_requeues_and_finishes(env: dict[str, str], tmp_path: Path) -> None:
    runs = Path(env["BTX_RUNS"])
    expert = sbatch(env, tmp_path, "math", "steps=60", options="--nodes=2 --job-name=x")
    held = f"--dependency=afterok:{expert} --kill-on-invalid-dep=yes"
    mix = sbatch(env, tmp_path, "math", script="mix.sh", options=held)
    wait_step(runs / "expert-math", 3)
    run(["scancel", "--signal=USR1", "--batch", expert], env, tmp_path)
    assert wait_end(env, expert, mix) == ["COMPLETED", "COMPLETED"]
    first, second = starts(runs / "expert-math")
    assert first["stop"] and second["first"] >= 3 and not second["stop"]
    assert job(env, expert)["Restarts"] == "1"
    log = (tmp_path / f"x_{expert}.out").read_text()
    assert "restart 0 of 10, 2 node(s) x 2 rank(s)" in log and "restart 1 of 10" in log, "the log was truncated"
    assert starts(runs / "joint")[0]["begin"] > second["end"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
def test_ranks_under_torchrun_get_the_time_to_save(env: dict[str, str], tmp_path: Path) -> None:
    """The stop reaches the ranks of two nodes past torchrun, which lives on until they have saved."""
    if not (Path(env["SLURM_CONF"]).parent / "hosts").exists():
        pytest.skip("the nodes have no names of their own: unshare --mount --uts needs root")
    repo = tmp_path / "repo"
    shutil.copytree(REPO / "slurm", repo / "slurm")
    (repo / "btx_nemo").mkdir()
    (repo / "btx_nemo" / "__init__.py").touch()  # without it an installed btx_nemo would go first
    shutil.copy(HERE / "fake_ranks.py", repo / "btx_nemo" / "__main__.py")
    del env["BTX_CLI"], env["PYTHONPATH"]
    env |= {"BTX_PYTHON": sys.executable, "BTX_NPROC": "1", "OMP_NUM_THREADS": "1"}
    script = str(repo / "slurm" / "train_expert.sh")
    expert = run(["sbatch", "--parsable", "--nodes=2", "--output=log", script, "math", "steps=40"], env, tmp_path)
    out = Path(env["BTX_RUNS"]) / "expert-math"
    wait_for(lambda: (out / "step").exists(), "the first step")
    run(["scancel", "--signal=USR1", "--batch", expert], env, tmp_path)
    assert wait_end(env, expert) == ["COMPLETED"]
    log = (tmp_path / "log").read_text()
    assert log.count("rank 1 of 2 starts") == 2 and log.count("saved by USR1") == 1, log
    # Otherwise torchrun died of the signal, and the ranks were orphans that a cgroup would have taken with it.
    assert log.count("(exitcode: 75)") == 2, log


def test_requeues_are_bounded(env: dict[str, str], tmp_path: Path) -> None:
    expert = sbatch(env | {"BTX_MAX_RESTARTS": "0"}, tmp_path, "math", "steps=600")
    wait_step(Path(env["BTX_RUNS"]) / "expert-math", 1)
    run(["scancel", "--signal=USR1", "--batch", expert], env, tmp_path)
    assert wait_end(env, expert) == ["FAILED"]
    assert job(env, expert)["ExitCode"] == "75:0"
    assert job(env, expert)["Restarts"] == "0"


def test_a_cancelled_expert_saves_and_stays_away(env: dict[str, str], tmp_path: Path) -> None:
    runs = Path(env["BTX_RUNS"])
    expert = sbatch(env, tmp_path, "math", "steps=600")
    wait_step(runs / "expert-math", 1)
    run(["scancel", expert], env, tmp_path)
    assert wait_end(env, expert) == ["CANCELLED"]
    wait_for(lambda: (runs / "expert-math" / "starts.jsonl").exists(), "the checkpoint of a cancelled job")
    assert job(env, expert)["Restarts"] == "0"


def test_a_failed_expert_stops_the_mix_and_no_other_expert(env: dict[str, str], tmp_path: Path) -> None:
    runs = Path(env["BTX_RUNS"])
    ids = submit(env | {"BTX_CONFIG": "expert"}, tmp_path, "['math'], overrides=['expert:fail=true']")
    calm = sbatch(env, tmp_path, "code")
    assert wait_end(env, *ids.values(), calm) == ["FAILED", "CANCELLED", "CANCELLED", "COMPLETED"]
    assert not (runs / "mix").exists() and not (runs / "joint").exists()


def test_the_mix_refuses_an_unfinished_expert(env: dict[str, str], tmp_path: Path) -> None:
    """Slurm takes `afterok` on a job it does not know as satisfied: the script has to look."""
    (Path(env["BTX_RUNS"]) / "expert-math" / "hf").mkdir(parents=True)
    mix = sbatch(env, tmp_path, "math", script="mix.sh", options="--dependency=afterok:99999")
    assert wait_end(env, mix) == ["FAILED"]
    assert job(env, mix)["ExitCode"] == "2:0"
    assert "expert-math/DONE is missing" in (tmp_path / f"btx-mix_{mix}.out").read_text()
    assert not (Path(env["BTX_RUNS"]) / "mix").exists()


def test_bad_domains_are_refused_and_nothing_runs(env: dict[str, str], tmp_path: Path) -> None:
    domains = ["a/b", "a b", "$(touch x)", "../x", "`touch x`", "", "-x", "A"]
    cases = [(script, d) for script in ("train_expert.sh", "mix.sh") for d in domains]
    ids = [sbatch(env, tmp_path, d, script=script) for script, d in cases]
    assert wait_end(env, *ids) == ["FAILED"] * len(ids)
    assert {job(env, i)["ExitCode"] for i in ids} == {"2:0"}
    assert not list(tmp_path.rglob("x")) and not list(Path(env["BTX_RUNS"]).glob("expert-*"))


def test_scripts_are_found_where_they_were_submitted_from(env: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "my repo" / "slurm"
    shutil.copytree(REPO / "slurm", copy)
    job_id = run(["sbatch", "--parsable", str(copy / "train_expert.sh"), "math", "note=a b"], env, tmp_path)
    assert wait_end(env, job_id) == ["COMPLETED"]
    assert starts(Path(env["BTX_RUNS"]) / "expert-math")[0]["argv"][-1] == "note=a b"


def test_two_jobs_on_one_node_meet_at_different_ports(env: dict[str, str], tmp_path: Path) -> None:
    ids = [sbatch(env, tmp_path, d, options="--nodelist=node1") for d in ("math", "code")]
    assert wait_end(env, *ids) == ["COMPLETED"] * 2
    logs = [(tmp_path / f"btx-expert_{i}.out").read_text() for i in ids]
    ports = {re.search(r"meeting at localhost:(\d+)", log)[1] for log in logs}
    assert len(ports) == 2
