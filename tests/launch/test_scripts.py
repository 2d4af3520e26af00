"""The scripts of slurm/ by themselves: what they refuse, evaluate (nothing), and hand to srun, containers and ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from btx_testing.slurm import FAKE, plain_environment

from btx_nemo.errors import Stopped

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "slurm"


def script(
    name: str, *arguments: str, runs: Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script as `bash`."""
    env = {**plain_environment(), "BTX_RUNS": str(runs), "BTX_CLI": str(FAKE), "BTX_PYTHON": sys.executable}
    command = ["bash", str(SCRIPTS / name), *arguments]
    return subprocess.run(command, env=env | environment, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("train_expert.sh", [], "no domain; usage"),
        ("train_expert.sh", ["a\nb"], r"domain $'a\nb': only a-z"),
        ("train_expert.sh", ["text"], "domain 'text': has another meaning"),
        ("train_expert.sh", ["math.A"], "stage 'math.A': only a-z"),
        ("train_expert.sh", ["math", "code"], "2 domains; name one, or submit an array: sbatch --array=0-1"),
        ("train_expert.sh", ["math", "steps=2", "oops"], "'oops': expected KEY=VALUE or --config-name=NAME"),
        ("train_expert.sh", ["math", "out=/x"], "override 'out=/x': this script sets out itself; choose the folder"),
        ("train_expert.sh", ["math", "+domain=y"], "this script sets domain itself"),
        ("train_expert.sh", ["math", "++out=z"], "this script sets out itself"),
        ("mix.sh", [], "no domain; usage"),
        ("mix.sh", ["math", "math"], "domain 'math' is named twice"),
        ("mix.sh", ["math", "seed=/x"], "this script sets seed itself"),
        ("mix.sh", ["math", "experts.code=/x"], "this script sets experts.code itself"),
        ("pair.sh", [], "0 domains; usage: pair.sh <domain>"),
        ("pair.sh", ["math", "code"], "2 domains; usage: pair.sh <domain>"),
        ("pair.sh", ["math", "seed=/x"], "this script sets seed itself"),
        ("pair.sh", ["math"], "the model {runs}/seed is not a folder; set BTX_SEED and BTX_ANCHOR"),
        ("train_anchor.sh", ["x"], "'x': expected KEY=VALUE"),
        ("train_anchor.sh", ["out=/x"], "this script sets out itself"),
        ("mix.sh", ["math"], "expert-math/DONE is missing: expert math is not finished; run train_expert.sh math"),
        ("train_mix.sh", ["lunch"], "start 'lunch': unknown; known: mix router"),
        ("train_mix.sh", ["mix router"], "start 'mix router': unknown"),
        ("train_mix.sh", ["mix", "router"], "'router': expected KEY=VALUE; name one start"),
        ("train_mix.sh", [], "mix is missing: there is nothing finished to start from"),
        ("train_mix.sh", ["init_from=/x"], "this script sets init_from itself"),
        ("train_router.sh", ["x"], "'x': expected KEY=VALUE"),
        ("train_router.sh", [], "mix is missing: the mixture is not assembled"),
        ("train_seed.sh", ["x"], "'x': expected KEY=VALUE"),
        ("export.sh", [], "joint/DONE is missing"),
        ("export.sh", ["mix"], "training 'mix': unknown; known: joint router"),
        ("export.sh", ["--config-name=x"], "an export has no configuration"),
        ("eval.sh", ["joint", "x=1"], "eval.sh takes no settings"),
        ("demo_data.sh", ["x"], "takes nothing but chats"),
        ("demo_data.sh", ["chats", "x=1"], "takes nothing but chats"),
    ],
)
def test_a_mistake_is_one_line(name: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    ended = script(name, *arguments, runs=tmp_path / "runs")
    lines = ended.stderr.splitlines()
    assert (ended.returncode, len(lines)) == (2, 1), ended.stderr
    assert message.replace("{runs}", f"{tmp_path}/runs") in ended.stderr and lines[0].startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["train_expert.sh", "mix.sh"])
def test_a_place_where_nothing_can_be_made(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = script(name, "math", runs=tmp_path / "file" / "runs")
    message = f"BTX_RUNS: '{tmp_path}/file/runs' cannot be made or entered; set BTX_RUNS"
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and message in ended.stderr


HOSTILE = "BASH_VERSINFO[$(touch hacked)0]"  # bash arithmetic runs this


@pytest.mark.parametrize(
    "variable",
    [
        *("BTX_NPROC", "BTX_MAX_RESTARTS", "BTX_CLI", "BTX_RUNS", "BTX_SEED", "BTX_DATA", "BTX_PYTHON"),
        *("BTX_ANCHOR", "BTX_CHATS"),
        *("BTX_CONTAINER", "BTX_CONTAINER_MOUNTS", "BTX_CONTAINER_RUNTIME", "BTX_REQUEUE_ON_FAILURE"),
        *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID"),
        *("SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_JOB_NODELIST", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_nothing_of_the_environment_is_evaluated(variable: str, tmp_path: Path) -> None:
    stub(tmp_path, "srun", "exit 0")
    stub(tmp_path, "scontrol", "echo node1")
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7"} if variable.startswith("SLURM_") else {}
    container = {"BTX_CONTAINER": "image"} if "CONTAINER_" in variable else {}
    environment = {"BTX_RUNS": str(tmp_path / "runs"), **path(tmp_path), **job, **container, variable: HOSTILE}
    env = {**plain_environment(), "BTX_CLI": str(FAKE), **environment}
    command = ["bash", str(SCRIPTS / "train_expert.sh"), "math", f"note={HOSTILE}", "steps=1"]
    subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=60)
    assert not list(tmp_path.rglob("hacked"))


def stub(tmp_path: Path, name: str, text: str) -> None:
    """A program on PATH."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
    (tmp_path / "bin" / name).chmod(0o755)


def path(tmp_path: Path) -> dict[str, str]:
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def job_environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """As in a job of two nodes; what srun is given goes into a file, a line each."""
    stub(tmp_path, "srun", f'printf "%s\\n" "$@" >"{tmp_path}/srun.$(ls {tmp_path} | grep -c srun)"')
    stub(tmp_path, "scontrol", '[[ $1 == show ]] && printf "node1\\nnode2\\n"')
    given = {"SLURM_JOB_ID": "31", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "BTX_CLI": ""}
    return path(tmp_path) | given | {"SLURM_GPUS_ON_NODE": "4", **more}


def given(tmp_path: Path, number: int = 0) -> list[str]:
    return (tmp_path / f"srun.{number}").read_text().splitlines()


def test_the_ranks_of_a_job(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ended = script("train_expert.sh", "math", "steps=1", runs=runs, **job_environment(tmp_path))
    assert "the command ended without an error, but" in ended.stderr, "srun did nothing, and that was believed"
    launcher = ["--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:20031"]
    assert given(tmp_path) == [
        *("--kill-on-bad-exit=1", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "bash", str(SCRIPTS / "node.sh")),
        *(sys.executable, "-m", "torch.distributed.run", *launcher, "--rdzv-id=31.0", "-m", "btx_nemo"),
        *("train", "--config-name=expert", "domain=math", f"out={runs}/expert-math", "export=true", "steps=1"),
    ]


def test_wrong_input_is_not_requeued_though_torchrun_ends_with_1(tmp_path: Path) -> None:
    """A crash is; what an earlier start said of its input does not count then."""
    runs = tmp_path / "runs"
    environment = job_environment(tmp_path, SLURM_JOB_NUM_NODES="1", BTX_REQUEUE_ON_FAILURE="1")
    stub(tmp_path, "srun", 'while [[ $1 == -* ]]; do shift; done; "$@"')
    stub(tmp_path, "scontrol", f'echo "$@" >>{tmp_path}/told')
    stub(tmp_path, "sleep", "exit 0")
    command = f'while [[ $1 == -* || $1 != btx_nemo ]]; do shift; done; {sys.executable} -m "$@"; exit 1'
    torchrun = f"if [[ $2 == torch.distributed.run ]]; then [[ -z ${{CRASH:-}} ]] || exit 1; {command}; fi"
    stub(tmp_path, "python", f'{torchrun}\nexec {sys.executable} "$@"')
    environment["BTX_PYTHON"] = str(tmp_path / "bin" / "python")
    ended = script("train_expert.sh", "math", "stepz=1", runs=runs, **environment)
    assert ended.returncode == 2 and "btx-nemo train: " in ended.stderr and "stepz" in ended.stderr, ended.stderr
    assert (runs / "state" / "expert-math.refused").exists() and not (tmp_path / "told").exists()
    ended = script("train_expert.sh", "math", "stepz=1", runs=runs, **environment, CRASH="1")
    assert ended.returncode == 1 and "requeue 1 of 10" in ended.stdout, ended.stderr
    assert (tmp_path / "told").read_text() == "requeue 31\n"


def test_a_task_of_an_array_takes_its_domain(tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "30", "SLURM_ARRAY_TASK_ID": "1"}
    ended = script("train_expert.sh", "math", "code", runs=tmp_path / "runs", **job_environment(tmp_path, **array))
    assert "domain=code" in given(tmp_path) and "job 30_1, restart 0" in ended.stdout
    array["SLURM_ARRAY_TASK_ID"] = "2"
    ended = script("train_expert.sh", "math", "code", runs=tmp_path / "runs", **job_environment(tmp_path, **array))
    assert ended.returncode == 2 and "array task 2, but there are 2 domains" in ended.stderr


def test_a_copy_in_a_spool_finds_the_scripts_it_was_submitted_from(tmp_path: Path) -> None:
    """Though Slurm's controller is away for a moment, and an override looks like the script's path."""
    runs, copy = tmp_path / "runs", tmp_path / "spool" / "slurm_script"
    copy.parent.mkdir()
    shutil.copy(SCRIPTS / "train_expert.sh", copy)
    environment = job_environment(tmp_path, SLURM_JOB_NUM_NODES="1", BTX_CLI=str(FAKE))
    shown = f"JobId=31 JobName=x\n   Command={SCRIPTS}/train_expert.sh math note=/a/train_expert.sh\n   WorkDir=/"
    stub(tmp_path, "scontrol", f'[[ -e {tmp_path}/away ]] || {{ touch {tmp_path}/away; exit 1; }}; echo "{shown}"')
    stub(tmp_path, "sleep", "exit 0")
    env = {**plain_environment(), **environment, "BTX_RUNS": str(runs), "BTX_PYTHON": sys.executable}
    command = ["bash", str(copy), "math", "note=/a/train_expert.sh"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "job 31, restart 0" in ended.stdout, ended.stderr


def test_a_script_without_its_folder_says_so(tmp_path: Path) -> None:
    """At once where there is no Slurm, and where Slurm does not know the job."""
    copy = shutil.copy(SCRIPTS / "train_expert.sh", tmp_path)
    stub(tmp_path, "sleep", "exit 0")
    stub(tmp_path, "scontrol", "exit 1")
    for job in ({}, {"SLURM_JOB_ID": "31"}):
        env = {**plain_environment(), **path(tmp_path), **job}
        ended = subprocess.run(["bash", copy, "math"], env=env, capture_output=True, text=True, timeout=60)
        message = "train_expert.sh: common.sh is not beside this script; run or submit it from the folder slurm/\n"
        assert (ended.returncode, ended.stderr) == (2, message)


def test_all_scripts_find_their_folder_in_the_same_way() -> None:
    """But for their names: nothing can be sourced before it is found."""
    blocks = {}
    for file in SCRIPTS.glob("*.sh"):
        _, start, rest = file.read_text().partition("\nhere=")
        if start:
            blocks[file.name] = rest.partition('source "$here/common.sh"')[0].replace(file.name, "NAME")
    assert len(blocks) == 10 and len(set(blocks.values())) == 1


def test_pyxis(tmp_path: Path) -> None:
    """Everything runs in the image, our own helper too, with the folders it needs mounted."""
    runs, data = tmp_path / "runs", tmp_path / "data"
    data.mkdir()
    more = {"BTX_CONTAINER": "nvcr.io#nvidia/nemo:25.09", "BTX_CONTAINER_MOUNTS": "/scratch:/scratch:ro"}
    environment = job_environment(tmp_path, **more, BTX_DATA=str(data), BTX_PYTHON="")
    script("train_expert.sh", "math", runs=runs, **environment)
    mounts = f"{REPO}:{REPO},{runs}:{runs},{data}:{data},/scratch:/scratch:ro"
    flags = ["--container-image=nvcr.io#nvidia/nemo:25.09", f"--container-mounts={mounts}"]
    flags += [f"--container-workdir={runs}", "--no-container-mount-home"]
    helper, ranks = given(tmp_path, 0), given(tmp_path, 1)
    assert helper[:5] == ranks[:5] == ["--kill-on-bad-exit=1", *flags]
    assert helper[5:11] == ["--nodes=1", "--ntasks=1", "python3", "-m", "btx_nemo", "stage"]
    assert ranks[8:12] == ["bash", str(SCRIPTS / "node.sh"), "python3", "-m"]


def test_apptainer(tmp_path: Path) -> None:
    stub(tmp_path, "apptainer", "exit 0")
    environment = job_environment(tmp_path, BTX_CONTAINER="/images/btx.sif", BTX_PYTHON="/opt/venv/bin/python")
    runs = tmp_path / "runs"
    script("train_expert.sh", "math", runs=runs, **environment)
    ranks = given(tmp_path, 1)
    inside = [f"{tmp_path}/bin/apptainer", "exec", "--bind", f"{REPO}:{REPO},{runs}:{runs}", "--pwd", str(runs)]
    assert ranks[4:13] == [*inside, "--nv", "/images/btx.sif", "bash"]
    assert ranks[14] == "/opt/venv/bin/python"


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (
            {"BTX_CONTAINER": "x", "BTX_CONTAINER_RUNTIME": "lxc"},
            2,
            "BTX_CONTAINER_RUNTIME='lxc': unknown; known: pyxis",
        ),
        ({"BTX_CONTAINER": "docker://x"}, 2, "pyxis is a part of Slurm"),
        ({"BTX_CONTAINER": "x.sif", "PATH": "/usr/bin:/bin"}, 3, "neither apptainer nor singularity is on PATH"),
    ],
)
def test_a_container_that_cannot_be(more: dict[str, str], code: int, message: str, tmp_path: Path) -> None:
    ended = script("train_expert.sh", "math", runs=tmp_path / "runs", **more)
    assert ended.returncode == code and message in ended.stderr


def test_apptainer_without_slurm_runs_the_ranks(tmp_path: Path) -> None:
    stub(tmp_path, "apptainer", 'while [[ $1 != *.sif ]]; do shift; done; shift; IN_IMAGE=1 exec "$@"')
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "config.json").write_text("{}")
    environment = {**path(tmp_path), "BTX_CONTAINER": "/x.sif", "BTX_SEED": str(tmp_path / "seed")}
    ended = script("train_expert.sh", "math", "steps=2", runs=tmp_path / "runs", **environment)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs" / "expert-math" / "DONE").exists()


@pytest.mark.parametrize(
    ("capability", "engine", "layout", "expected"),
    [
        ("", False, "layout.tp=2", {}),
        ("8.0", False, "layout.tp=2", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("8.0", False, "layout.ep=2", {}),
        ("8.0", True, "layout.tp=1", {}),
        ("9.0", True, "layout.cp=16", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_FWD_LAYERNORM_SM_MARGIN": "16"}),
        ("10.0", False, "layout.tp=2", {}),
        ("10.0", True, "++layout.tp=2", {"NVTE_FWD_LAYERNORM_SM_MARGIN": "16"}),
        ("$(touch x)", True, "layout.tp=2", {}),
    ],
)
def test_settings_of_nccl_and_transformer_engine(
    capability: str, engine: bool, layout: str, expected: dict[str, str], tmp_path: Path
) -> None:
    """By the device and by what is installed: node.sh starts the ranks with them."""
    stub(tmp_path, "nvidia-smi", f"echo '{capability}'" if capability else "exit 9")
    stub(tmp_path, "python", f"if [[ $1 == -c ]]; then exit {int(not engine)}; fi; env")
    command = ["bash", str(SCRIPTS / "node.sh"), f"{tmp_path}/bin/python", "-m", "x", layout]
    shown = subprocess.run(
        command, env={**plain_environment(), **path(tmp_path)}, capture_output=True, text=True, check=True
    )
    seen = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_FWD_LAYERNORM_SM_MARGIN")
    assert {name: seen[name] for name in names if name in seen} == expected
    assert seen["NCCL_DEBUG"] == "WARN"


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    stub(tmp_path, "nvidia-smi", "echo 8.0")
    env = {**plain_environment(), **path(tmp_path), "CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_DEBUG": "INFO"}
    command = ["bash", str(SCRIPTS / "node.sh"), "env", "layout.tp=2"]
    shown = subprocess.run(["bash", "-c", f"{' '.join(command[:2])} env"], env=env, capture_output=True, text=True)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8" in shown.stdout and "NCCL_DEBUG=INFO" in shown.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_saves_and_the_same_command_resumes(tmp_path: Path, number: signal.Signals) -> None:
    runs = tmp_path / "runs"
    (runs / "seed").mkdir(parents=True)
    command = ["bash", str(SCRIPTS / "train_expert.sh"), "math", "steps=40"]
    environment = {
        **plain_environment(),
        "BTX_RUNS": str(runs),
        "BTX_CLI": str(FAKE),
        "BTX_PYTHON": sys.executable,
        "PYTHONPATH": str(REPO),
    }
    process = subprocess.Popen(command, env=environment)
    latest = runs / "expert-math" / "latest"
    end = time.monotonic() + 60
    while not latest.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) == Stopped.exit_code
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0
    first, second = (json.loads(s) for s in (runs / "expert-math" / "starts.jsonl").read_text().splitlines())
    assert first["stop"] == [signal.SIGTERM] and second["first"] > 0
    story = [line.split("\t")[1] for line in (runs / "state" / "expert-math.events").read_text().splitlines()]
    assert story == ["start", "stopped", "start", "done"]


def test_a_mix_of_other_experts_is_put_aside(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("seed", "expert-math/hf", "expert-code/hf"):
        (runs / name).mkdir(parents=True)
        (runs / name / "config.json").write_text(name)
    for domain in ("math", "code"):
        (runs / f"expert-{domain}" / "DONE").touch()
    assert script("mix.sh", "math", runs=runs).returncode == 0
    assert "done" in script("mix.sh", "math", runs=runs).stdout and not (runs / "stale").exists()
    ended = script("mix.sh", "math", "code", runs=runs)
    assert ended.returncode == 0 and "made of another expert-code; put aside as" in ended.stdout, ended.stderr
    assert "experts.code" in (runs / "mix" / "manifest.json").read_text()
    ended = script("mix.sh", "math", "code", "top_k=1", runs=runs)
    assert ended.returncode == 2 and "was made with top_k=unset, now 1" in ended.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: apt-get install shellcheck")
def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [*SCRIPTS.glob("*.sh"), *(p for p in (REPO / "tests").rglob("*.sh") if p.parent.name != "golden")]
    result = subprocess.run(["shellcheck", "-x", *map(str, scripts)], cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
