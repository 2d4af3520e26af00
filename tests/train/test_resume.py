"""A run that is killed or stopped at any moment, and started again, ends as one that never was."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from btx_testing.commands import CommandServer, clean_environment, ok, run_module, torchrun, wait_until
from btx_testing.runs import TinyWorld, curve, logged_step, metrics, saved_step, weights
from btx_testing.tensors import temporaries

DEATH = "btx_testing.death:at?"
RUN, SAVING = "btx_nemo.train.run", "btx_nemo.train.saving"
LONG = {"steps": 60, "checkpoint__every": 20}


def assert_same_run(one: Path, other: Path) -> None:
    assert weights(one) == weights(other)
    assert metrics(one) == metrics(other)


@pytest.fixture(scope="module")
def whole_mixture(world: TinyWorld, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a mixture, on one rank; read only."""
    out = tmp_path_factory.mktemp("whole-mixture") / "run"
    ok(commands.run(*world.arguments("tiny_mix", out)))
    return out


def test_two_runs_are_one_run(world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path) -> None:
    """What the laws below rest on; and the runs do learn."""
    ok(commands.run(*world.arguments("tiny_expert", tmp_path / "run")))
    assert_same_run(tmp_path / "run", whole)
    losses = [record["loss"] for record in metrics(whole) if "loss" in record]
    assert losses[-1] < losses[0] - 0.3


def test_sigkill_between_two_checkpoints(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """The real command in its own interpreter."""
    import sys

    ok(commands.run(*world.arguments("tiny_expert", tmp_path / "whole", **LONG)))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "btx_nemo", *world.arguments("tiny_expert", out, **LONG)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=clean_environment())
    wait_until(lambda: logged_step(out) > 24)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 20 <= saved_step(out) < 60
    assert logged_step(out) > saved_step(out)
    assert not (out / "DONE").exists()
    ok(run_module(*world.arguments("tiny_expert", out, **LONG)))
    assert_same_run(out, tmp_path / "whole")


def test_a_mixture_on_two_ranks_whose_second_rank_is_killed(
    world: TinyWorld, commands: CommandServer, tmp_path: Path
) -> None:
    """Through torchrun, experts spread over the ranks; the death of one rank ends the job."""
    options = {"layout__ep": 2, **LONG}
    for ended in commands.run_ranks(2, *world.arguments("tiny_mix", tmp_path / "whole", **options)):
        ok(ended)
    out = tmp_path / "run"
    arguments = world.arguments("tiny_mix", out, **options)
    ended = run_module("--die", "1:27", *arguments, launcher=torchrun(2), module="btx_testing.mortal")
    assert ended.code == 1
    assert "Signal 9 (SIGKILL)" in ended.err
    assert saved_step(out) == 20
    assert not (out / "DONE").exists()
    for ended in commands.run_ranks(2, *arguments):
        ok(ended)
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("place", "saved"),
    [
        pytest.param(f"{RUN}:save_resolved:1", 0, id="before-the-configuration"),
        pytest.param(f"{RUN}:build_trainee:1", 0, id="before-the-first-step"),
        pytest.param(f"{SAVING}:save_model_config:1", 0, id="first-checkpoint-without-latest"),
        pytest.param(f"{SAVING}:write_manifest:2", 4, id="before-the-manifest"),
        pytest.param(f"{SAVING}:fsync_tree:2", 4, id="before-the-rename"),
        pytest.param(f"{SAVING}:_point_to:2", 4, id="before-latest"),
        pytest.param(f"{SAVING}:_prune:2", 8, id="before-pruning"),
        pytest.param("btx_nemo.train.metrics:MetricsFile.write:13", 8, id="before-a-metric"),
        pytest.param("btx_nemo.convert.to_hf:write_manifest:1", 12, id="while-exporting"),
        pytest.param(f"{RUN}:write_file:1", 12, id="before-DONE"),
    ],
)
def test_killed_at_one_exact_place(
    world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path, place: str, saved: int
) -> None:
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out)
    assert commands.run(*arguments, before=DEATH + place).code == -signal.SIGKILL
    assert saved_step(out) == saved
    assert not (out / "DONE").exists()
    ok(commands.run(*arguments))
    assert_same_run(out, whole)
    assert temporaries(out) == temporaries(out / "checkpoints") == []
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000012"]  # keep=1


def test_an_abandoned_future_does_not_push_out_the_present(
    world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path
) -> None:
    """Step 8 is whole but not yet `latest`; the run starts again from 4 and is stopped at 6, with keep=1."""
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out)
    assert commands.run(*arguments, before=f"{DEATH}{SAVING}:_point_to:2").code == -signal.SIGKILL
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step_00000004", "step_00000008"]
    assert commands.run(*arguments, before=f"btx_testing.death:term_at?{RUN}:train_step:2").code == 75
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000006"]
    ok(commands.run(*arguments))
    assert_same_run(out, whole)


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(
    world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path, asynchronous: bool
) -> None:
    out = tmp_path / "disk" / "run"
    out.parent.mkdir()
    size = sum(path.stat().st_size for path in (whole / "checkpoints").rglob("*") if path.is_file())
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size) + 300_000}", "tmpfs", out.parent])
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs (root)")
    try:
        arguments = world.arguments("tiny_expert", out, checkpoint__asynchronous=asynchronous)
        ended = commands.run(*arguments)
        assert ended.code == 2, ended.err
        assert (
            "the disk or a quota is full, a checkpoint could not be saved; the previous one is as it was" in ended.err
        )
        assert saved_step(out) == 4
        assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000004"]
        subprocess.run(["mount", "-o", "remount,size=200M", out.parent], check=True)
        ok(commands.run(*arguments))
        assert_same_run(out, whole)
    finally:
        subprocess.run(["umount", out.parent], check=True)


def test_killed_while_megatron_writes(world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out)
    pattern = f"{out}/checkpoints/.step_00000008.tmp-*/*.distcp"
    ended = commands.run(*arguments, before=f"btx_testing.death:while_writing?{pattern}")
    assert ended.code == -signal.SIGKILL
    assert saved_step(out) == 4
    ok(commands.run(*arguments))
    assert_same_run(out, whole)


def test_killed_again_and_again(world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out)
    for call in (6, 3, 5):
        assert commands.run(*arguments, before=f"{DEATH}{RUN}:train_step:{call}").code == -signal.SIGKILL
    assert saved_step(out) == 8
    ok(commands.run(*arguments))
    assert_same_run(out, whole)


@pytest.mark.parametrize("how", ["term_at", "usr1_at"])
def test_a_signal_leaves_a_checkpoint_and_75(
    world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path, how: str
) -> None:
    """SIGTERM to all processes of the job, as Slurm sends it; SIGUSR1 many times, while saving too."""
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out)
    ended = commands.run(*arguments, before=f"btx_testing.death:{how}?{RUN}:train_step:6")
    assert ended.code == 75, ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("btx-nemo")]
    assert "the same command resumes" in line
    assert saved_step(out) == 6
    assert not (out / "DONE").exists()
    ok(commands.run(*arguments))
    assert_same_run(out, whole)


def test_a_signal_to_one_rank_stops_all(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """No checkpoint but the one on request, and one line for the job."""
    out = tmp_path / "run"
    arguments = world.arguments("tiny_mix", out, layout__ep=2, checkpoint__every=0, steps=400)
    first, second = commands.start_ranks(2, *arguments)
    wait_until(lambda: logged_step(out) > 2)
    second.kill(signal.SIGTERM)
    ends = [first.wait(), second.wait()]
    assert [ended.code for ended in ends] == [75, 75]
    assert [ended.err.count("btx-nemo train:") for ended in ends] == [1, 0]
    assert 2 < saved_step(out) < 400


def test_a_signal_at_the_last_step_is_no_stop(
    world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path
) -> None:
    before = f"btx_testing.death:term_at?{RUN}:train_step:12"
    ok(commands.run(*world.arguments("tiny_expert", tmp_path / "run"), before=before))
    assert_same_run(tmp_path / "run", whole)


def test_nothing_to_do_once_done(world: TinyWorld, commands: CommandServer, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    ended = ok(commands.run(*world.arguments("tiny_expert", whole)))
    assert "done already" in ended.out
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


@pytest.fixture(scope="module")
def half(world: TinyWorld, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run that was stopped after step 6 of 12; copy it."""
    out = tmp_path_factory.mktemp("half") / "run"
    before = f"btx_testing.death:term_at?{RUN}:train_step:6"
    assert commands.run(*world.arguments("tiny_expert", out), before=before).code == 75
    return out


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ({"optim__lr": 0.5}, "optim.lr"),
        ({"steps": 24}, "steps"),
        ({"seed": 9}, "seed"),
        ({"global_batch_size": 8}, "global_batch_size"),
        ({"domain": "code"}, "domain"),
    ],
)
def test_what_changes_the_result_is_refused(
    world: TinyWorld, commands: CommandServer, half: Path, override: dict[str, Any], key: str
) -> None:
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    ended = commands.run(*world.arguments("tiny_expert", half, **override))
    assert ended.code == 2
    assert ended.err.startswith(f"btx-nemo train: out={half}: was started with {key}=")
    assert ended.err.count("\n") == 1
    assert {path: path.read_bytes() for path in half.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_is_told_and_left_alone(
    world: TinyWorld, commands: CommandServer, half: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(half, tmp_path / "run"))
    (file,) = (out / "checkpoints" / "step_00000006").glob("__0_0.distcp")
    os.truncate(file, file.stat().st_size - 100)
    ended = commands.run(*world.arguments("tiny_expert", out))
    assert ended.code == 2
    assert ended.err.startswith(f"btx-nemo train: {file}: ")
    assert ended.err.count("\n") == 1


def test_a_damaged_configuration_is_told(world: TinyWorld, commands: CommandServer, half: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(half, tmp_path / "run"))
    (out / "resolved.yaml").write_text("optim: {lr: ")
    ended = commands.run(*world.arguments("tiny_expert", out))
    assert ended.code == 2
    assert "resolved.yaml: damaged" in ended.err


def test_a_run_without_a_checkpoint_has_nothing_to_agree_with(
    world: TinyWorld, commands: CommandServer, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "resolved.yaml").write_text("{steps: 77, optim: {lr: 1.0}}")
    ok(commands.run(*world.arguments("tiny_expert", out, steps=0, optim__warmup_steps=0, export=False)))
    assert "steps: 0" in (out / "resolved.yaml").read_text()


LAYOUTS = [
    pytest.param({"tp": 2}, 2, id="tp2"),
    pytest.param({"pp": 2}, 2, id="pp2"),
    pytest.param({"ep": 2}, 2, id="ep2"),
    pytest.param({"tp": 2, "ep": 2}, 2, id="tp2-ep2"),
    pytest.param({"cp": 2}, 2, id="cp2"),
    pytest.param({"etp": 2}, 2, id="etp2"),
]


@pytest.fixture(scope="module")
def half_mixture(world: TinyWorld, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture's run on one rank that was stopped after step 6 of 12; copy it."""
    out = tmp_path_factory.mktemp("half-mixture") / "run"
    before = f"btx_testing.death:term_at?{RUN}:train_step:6"
    assert commands.run(*world.arguments("tiny_mix", out), before=before).code == 75
    return out


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
def test_resumed_at_another_layout(
    world: TinyWorld,
    commands: CommandServer,
    half_mixture: Path,
    whole_mixture: Path,
    tmp_path: Path,
    layout: dict[str, int],
    count: int,
) -> None:
    out = Path(shutil.copytree(half_mixture, tmp_path / "run"))
    options = {f"layout__{name}": size for name, size in layout.items()}
    for ended in commands.run_ranks(count, *world.arguments("tiny_mix", out, **options)):
        ok(ended)
    assert curve(out) == pytest.approx(curve(whole_mixture), abs=1e-4)


@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, {"cp": 2}, {"etp": 2}], ids=["tp2-ep2", "cp2", "etp2"])
def test_saved_at_two_ranks_resumed_at_one(
    world: TinyWorld, commands: CommandServer, whole_mixture: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    out = tmp_path / "run"
    spread = world.arguments("tiny_mix", out, **{f"layout__{name}": size for name, size in layout.items()})
    before = f"btx_testing.death:term_at?{RUN}:train_step:6"
    assert [rank.wait().code for rank in commands.start_ranks(2, *spread, before=before)] == [75, 75]
    ok(commands.run(*world.arguments("tiny_mix", out)))
    assert curve(out) == pytest.approx(curve(whole_mixture), abs=1e-4)


def test_a_lost_optimizer_state_would_show(
    world: TinyWorld, commands: CommandServer, half_mixture: Path, whole_mixture: Path, tmp_path: Path
) -> None:
    """The laws above do look at the optimizer: without its state, the loss two steps later is another."""
    out = Path(shutil.copytree(half_mixture, tmp_path / "run"))
    ok(commands.run(*world.arguments("tiny_mix", out), before="btx_testing.death:forget_optimizer?"))
    after = [r["loss"] for r in metrics(out) if "loss" in r and r["step"] in (7, 8)]
    expected = [r["loss"] for r in metrics(whole_mixture) if "loss" in r and r["step"] in (7, 8)]
    assert after[0] == pytest.approx(expected[0], abs=1e-6)
    assert abs(after[1] - expected[1]) > 1e-3


def test_bf16_keeps_its_main_weights(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """The fp32 weights behind bf16 ones are state as well: without them a resumed run would drift."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    ok(commands.run(*world.arguments("tiny_mix", whole, precision="bf16")))
    arguments = world.arguments("tiny_mix", out, precision="bf16")
    assert commands.run(*arguments, before=f"{DEATH}{RUN}:train_step:7").code == -signal.SIGKILL
    ok(commands.run(*arguments))
    assert_same_run(out, whole)


@pytest.mark.parametrize(
    ("layout", "patterns", "frozen"),
    [
        pytest.param(
            "pp", "['decoder.layers.0.*','embedding.*']", r"model\.(layers\.0|embed_tokens)\..*", marks=pytest.mark.slow
        ),
        ("pp", "['decoder.layers.1.*','*final*','output_layer.*']", r"(model\.(layers\.1|norm)|lm_head)\..*"),
        pytest.param("pp", "[*.mlp.experts.*]", r".*\.experts\..*", marks=pytest.mark.slow),
        pytest.param("pp", "[*.local_experts.0.*]", r".*\.experts\.0\..*", marks=pytest.mark.slow),
        pytest.param("ep", "['*.local_experts.[01].*']", r".*\.experts\.[01]\..*", marks=pytest.mark.slow),
        ("ep", "['*.local_experts.[23].*']", r".*\.experts\.[23]\..*"),
    ],
)
def test_a_partly_frozen_mixture(
    world: TinyWorld, commands: CommandServer, tmp_path: Path, layout: str, patterns: str, frozen: str
) -> None:
    """Two ranks, one of them with nothing, or no expert, to train in most cases; then one rank, and two again."""
    from btx_testing.tensors import load_folder
    from safetensors.torch import load

    options = {f"layout__{layout}": 2, "freeze": patterns}
    for ended in commands.run_ranks(2, *world.arguments("tiny_mix", tmp_path / "whole", **options)):
        ok(ended)
    out = tmp_path / "run"
    arguments = world.arguments("tiny_mix", out, **options)
    before = f"btx_testing.death:term_at?{RUN}:train_step:6"
    assert [rank.wait().code for rank in commands.start_ranks(2, *arguments, before=before)] == [75, 75]
    other = Path(shutil.copytree(out, tmp_path / "other"))
    for ended in commands.run_ranks(2, *arguments):
        ok(ended)
    assert_same_run(out, tmp_path / "whole")
    alone = world.arguments("tiny_mix", other, freeze=patterns)
    assert commands.run(*alone, before=f"btx_testing.death:term_at?{RUN}:train_step:2").code == 75
    for ended in commands.run_ranks(2, *world.arguments("tiny_mix", other, **options)):
        ok(ended)
    assert curve(other) == pytest.approx(curve(out), abs=1e-4)
    seed, trained = load_folder(world.mixture), load(weights(out))
    kept = {name for name, value in trained.items() if value.equal(seed[name])}
    assert kept == {name for name in seed if re.fullmatch(frozen, name)}


def test_a_lost_latest_loses_no_step(
    world: TinyWorld, commands: CommandServer, half: Path, whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(half, tmp_path / "run"))
    (out / "latest").unlink()
    (out / "latest").symlink_to("nowhere")
    ok(commands.run(*world.arguments("tiny_expert", out)))
    assert_same_run(out, whole)
    assert not (out / "latest").is_symlink()


def test_other_data_are_refused(world: TinyWorld, commands: CommandServer, half: Path, tmp_path: Path) -> None:
    """A domain more, or other tokens; but not another domain of the folder, which the run only validates on."""
    out = Path(shutil.copytree(half, tmp_path / "run"))
    record = json.loads((out / "data.json").read_text())
    assert set(record) == {"math"} and "sources" not in record["math"]
    (out / "data.json").write_text(json.dumps({**record, "law": record["math"]}))
    ended = commands.run(*world.arguments("tiny_expert", out))
    assert ended.code == 2 and "was started on other data: law had 5 documents of" in ended.err, ended.err
    record["math"]["train"]["tokens"] += 1
    (out / "data.json").write_text(json.dumps(record))
    ended = commands.run(*world.arguments("tiny_expert", out))
    assert ended.code == 2 and "was started on other data: math had" in ended.err, ended.err
    meta = json.loads((world.data / "math" / "meta.json").read_text())
    (out / "data.json").write_text(json.dumps({"math": meta, "validated": meta}))  # as versions before had it
    ok(commands.run(*world.arguments("tiny_expert", out), "--dry-run"))


def test_a_run_of_no_steps_leaves_its_model(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    from btx_testing.tensors import load_folder, same_bits
    from safetensors.torch import load

    out = tmp_path / "run"
    ok(commands.run(*world.arguments("tiny_expert", out, steps=0, optim__warmup_steps=0)))
    assert same_bits(load(weights(out)), load_folder(world.dense))
    assert json.loads((out / "DONE").read_text()) == {"step": 0}


def test_two_at_once_in_one_folder(world: TinyWorld, commands: CommandServer, whole: Path, tmp_path: Path) -> None:
    """The second is refused in a line, and the first does not notice."""
    out = tmp_path / "run"
    first = commands.start(*world.arguments("tiny_expert", out))
    wait_until(lambda: (out / "resolved.yaml").exists())
    second = commands.run(*world.arguments("tiny_expert", out))
    assert second.code == 2, second.err
    assert "another process trains in it" in second.err
    ok(first.wait())
    assert_same_run(out, whole)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_checkpoint_that_would_execute_is_refused(
    world: TinyWorld, commands: CommandServer, tmp_path: Path, name: str
) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "executed"),)

    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out)
    assert commands.run(*arguments, before=f"btx_testing.death:term_at?{RUN}:train_step:6").code == 75
    folder = out / "checkpoints" / "step_00000006"
    (folder / name).write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size": (folder / name).stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    ended = commands.run(*arguments)
    assert ended.code == 2, ended.err
    assert name in ended.err
    assert not (tmp_path / "executed").exists()


def test_noise_of_the_right_size_is_one_line(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = world.arguments("tiny_expert", out)
    assert commands.run(*arguments, before=f"btx_testing.death:term_at?{RUN}:train_step:6").code == 75
    for file in (out / "checkpoints" / "step_00000006").glob("*.distcp"):
        file.write_bytes(b"\xa5" * file.stat().st_size)
    ended = commands.run(*arguments)
    assert ended.code == 2, ended.err
    assert "cannot be read" in ended.err and ended.err.count("\n") == 1
