"""`submit`: the printed script against a golden one, what is skipped, what is refused, and the run without Slurm."""

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
from btx_testing.commands import CommandServer
from btx_testing.mixing import SMALL
from btx_testing.models import make_llama
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.errors import BtxError, EnvironmentLacks, Stopped, UserError
from btx_nemo.launch import submit as module
from btx_nemo.launch.submit import plan, scripts_dir, submit

REPO = Path(__file__).resolve().parents[2]
FAKE = REPO / "tests" / "slurm" / "fake_btx.py"

GOLDEN = """\
set -e
export BTX_RUNS='{runs}'
export BTX_PYTHON=/opt/python
mkdir -p '{runs}/logs'
job1=$(sbatch --parsable --export=ALL --job-name=btx-expert-math '--output={runs}/logs/%x_%j.out' --time=12:00:00 \
{slurm}/train_expert.sh math steps=10 'note=it'"'"'s $(x)')
echo "btx-expert-math $job1"
job2=$(sbatch --parsable --export=ALL --job-name=btx-expert-code-py '--output={runs}/logs/%x_%j.out' --time=12:00:00 \
{slurm}/train_expert.sh code-py steps=10 'note=it'"'"'s $(x)')
echo "btx-expert-code-py $job2"
job3=$(sbatch "--dependency=afterok:$job1:$job2" --kill-on-invalid-dep=yes --parsable --export=ALL \
--job-name=btx-mix '--output={runs}/logs/%x_%j.out' --time=12:00:00 \
{slurm}/mix.sh math code-py -- 'note=it'"'"'s $(x)' layout.ep=2)
echo "btx-mix $job3"
job4=$(sbatch "--dependency=afterok:$job3" --kill-on-invalid-dep=yes --parsable --export=ALL \
--job-name=btx-export '--output={runs}/logs/%x_%j.out' --time=12:00:00 \
{slurm}/export.sh)
echo "btx-export $job4"
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs folder with a seed and a space in its name, the stand-in for the command, and no sbatch on PATH."""
    for name in [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_", "BTX_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BTX_CLI", str(FAKE))
    monkeypatch.setattr(module, "has_slurm", lambda: False)
    folder = tmp_path / "my runs"
    (folder / "seed").mkdir(parents=True)
    return folder


def finish(run: Path) -> None:
    run.mkdir(parents=True)
    (run / "DONE").touch()


def test_printed_script_is_the_golden_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "has_slurm", lambda: True)
    monkeypatch.setenv("BTX_PYTHON", "/opt/python")
    overrides = ["expert:steps=10", "note=it's $(x)", "mix:layout.ep=2"]
    submit(["math", "code-py"], sbatch_options=["--time=12:00:00"], overrides=overrides, runs_dir=runs, dry_run=True)
    assert capsys.readouterr().out == GOLDEN.format(runs=runs, slurm=REPO / "slurm")
    assert [p.name for p in runs.iterdir()] == ["seed"]


def test_what_is_done_is_left_out(runs: Path) -> None:
    def names() -> list[str]:
        return [f"{job.name}<{','.join(job.after)}" for job in plan(["math", "code"], runs=runs, scripts=scripts_dir())]

    finish(runs / "expert-math")
    assert names() == ["btx-expert-code<", "btx-mix<btx-expert-code", "btx-export<btx-mix"]
    finish(runs / "expert-code")
    assert names() == ["btx-mix<", "btx-export<btx-mix"]
    finish(runs / "joint")
    assert names() == ["btx-export<"]
    (runs / "export").mkdir()
    assert names() == []


@pytest.mark.parametrize("domain", ["a/b", "a b", "$(touch x)", "", "-x", "A", "ä", "a\n", "3d", "seed"])
def test_bad_domain_is_refused(domain: str, runs: Path) -> None:
    with pytest.raises(UserError, match="rename the domain"):
        submit(["math", domain], runs_dir=runs)


@pytest.mark.parametrize("script", ["train_expert.sh", "mix.sh"])
def test_the_scripts_say_in_one_line_what_is_wrong(script: str, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for domain, folder, message in (
        ("a\nb", runs, r"domain $'a\nb': only a-z"),
        ("text", runs, "domain 'text': has another meaning"),
        ("math", tmp_path / "file/runs", f"BTX_RUNS: '{tmp_path}/file/runs' cannot be made or entered; set BTX_RUNS"),
    ):
        environment = {**os.environ, "BTX_RUNS": str(folder), "BTX_LOCAL": "1"}
        command = ["bash", str(REPO / "slurm" / script), domain]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
        assert message in ended.stderr


def test_no_domain_a_repeated_one_and_missing_scripts(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no domain"):
        submit([], runs_dir=runs)
    with pytest.raises(UserError, match="named twice"):
        submit(["math", "math"], runs_dir=runs)
    monkeypatch.setattr(module, "__file__", str(runs / "a" / "b" / "c.py"))
    with pytest.raises(EnvironmentLacks, match="install btx-nemo again"):
        submit(["math"], runs_dir=runs)


def test_whole_pipeline_here_and_again(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    submit(["math", "code"], runs_dir=runs)
    assert json.loads((runs / "export" / "config.json").read_text())["in"] == f"{runs}/joint"
    mix = json.loads((runs / "mix" / "config.json").read_text())
    assert (mix["experts.math"], mix["experts.code"]) == (f"{runs}/expert-math/hf", f"{runs}/expert-code/hf")
    capfd.readouterr()
    submit(["math", "code"], runs_dir=runs)
    assert "nothing to do" in capfd.readouterr().out
    assert len((runs / "joint" / "starts.jsonl").read_text().splitlines()) == 1


def test_settings_of_the_export_arrive_at_the_command(tmp_path: Path, commands: CommandServer) -> None:
    runs = tmp_path / "runs"
    folder = make_llama(tmp_path / "hf", **SMALL)
    import_hf(folder, runs / "joint" / "checkpoints" / "step_00000001")
    (runs / "joint" / "latest").write_text("step_00000001\n")
    (runs / "joint" / "DONE").touch()
    finish(runs / "expert-math")
    command = ("submit", "math", "--local", "--runs", runs, "--")
    ended = commands.run(*command, "export:dtype=fp7")
    assert ended.code == 2 and "dtype=fp7: unknown; known: float32" in ended.err
    ended = commands.run(*command, "export:dtype=bfloat16", "export:shard_size=20000", "steps=7")
    assert ended.code == 0, ended.err
    exported = load_folder(runs / "export")
    assert {str(tensor.dtype) for tensor in exported.values()} == {"torch.bfloat16"}
    assert same_bits(exported, {name: tensor.bfloat16() for name, tensor in load_folder(folder).items()})
    assert len(list((runs / "export").glob("*.safetensors"))) > 1


def test_a_failing_script_is_named_and_ends_it(runs: Path) -> None:
    with pytest.raises(BtxError, match=r"btx-expert-math: .*train_expert\.sh ended with status 1"):
        submit(["math", "code"], overrides=["expert:fail=true"], runs_dir=runs)
    assert not (runs / "expert-code").exists()


def test_a_mix_of_other_domains_is_not_taken_for_this_one(runs: Path) -> None:
    submit(["math"], runs_dir=runs)
    finish(runs / "expert-code")
    (runs / "expert-code" / "hf").mkdir()
    result = subprocess.run(
        ["bash", str(REPO / "slurm" / "mix.sh"), "math", "code"],
        env={**os.environ, "BTX_RUNS": str(runs)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "holds a mix of 'math', not of 'math code'" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_saves_and_the_same_command_resumes(runs: Path, number: signal.Signals) -> None:
    command = ["bash", str(REPO / "slurm" / "train_expert.sh"), "math", "steps=40"]
    environment = {**os.environ, "BTX_RUNS": str(runs)}
    process = subprocess.Popen(command, env=environment)
    latest = runs / "expert-math" / "latest"
    end = time.monotonic() + 20
    while not latest.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=20) == Stopped.exit_code
    assert subprocess.run(command, env=environment, timeout=20).returncode == 0
    first, second = (json.loads(s) for s in (runs / "expert-math" / "starts.jsonl").read_text().splitlines())
    assert first["stop"] == [signal.SIGTERM] and second["first"] > 0


def test_a_term_of_submit_reaches_the_ranks(runs: Path) -> None:
    code = f"from btx_nemo.launch.submit import submit; submit(['math'], runs_dir={str(runs)!r}, local=True,"
    code += " overrides=['steps=400'])"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    latest = runs / "expert-math" / "latest"
    end = time.monotonic() + 20
    while not latest.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.terminate()
    _, stderr = process.communicate(timeout=20)
    assert "Stopped: submit: btx-expert-math" in stderr
    assert not (runs / "expert-math" / "DONE").exists()


def test_a_refused_submission_leaves_nothing_in_the_queue(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = tmp_path / "bin"
    stubs.mkdir()
    calls = tmp_path / "calls"
    (stubs / "sbatch").write_text(
        f'#!/bin/sh\necho "sbatch $*" >>"{calls}"\ncase "$*" in *mix*) echo "no such QOS" >&2; exit 1;; esac\n'
        f'grep -c . "{calls}"\n'
    )
    (stubs / "scancel").write_text(f'#!/bin/sh\necho "scancel $*" >>"{calls}"\n')
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "has_slurm", lambda: True)
    with pytest.raises(UserError, match="sbatch refused btx-mix: no such QOS; nothing stays submitted"):
        submit(["math", "code"], runs_dir=runs)
    lines = calls.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["sbatch"] * 3 + ["scancel"]
    assert "--dependency=afterok:1:2 --kill-on-invalid-dep=yes" in lines[2]
    assert lines[3] == "scancel 1 2"


HOSTILE = "BASH_VERSINFO[$(touch hacked)0]"  # bash arithmetic runs this


@pytest.mark.parametrize(
    "variable", ["BTX_NPROC", "BTX_MAX_RESTARTS", "SLURM_RESTART_COUNT", "BTX_CLI", "BTX_RUNS", "BTX_CONFIG"]
)
def test_nothing_of_the_environment_is_evaluated(variable: str, runs: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "BTX_RUNS": str(runs), variable: HOSTILE}
    subprocess.run(["bash", str(REPO / "slurm" / "train_expert.sh"), "math"], env=environment, cwd=tmp_path)
    assert not list(tmp_path.rglob("hacked"))


@pytest.mark.parametrize("override", ["out=/x", "+domain=y", "++out=z"])
def test_a_script_keeps_its_own_folders(override: str, runs: Path, tmp_path: Path) -> None:
    command = ["bash", str(REPO / "slurm" / "train_expert.sh"), "math", override]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and "BTX_RUNS" in result.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: apt-get install shellcheck")
def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [*(REPO / "slurm").glob("*.sh"), *(REPO / "tests").rglob("*.sh")]
    result = subprocess.run(["shellcheck", "-x", *map(str, scripts)], cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("status", "expected"), [(0, True), (1, False)])
def test_a_client_without_configuration_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, expected: bool
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nexit {status}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.has_slurm() is expected
