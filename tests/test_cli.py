"""The command line as a script sees it: help, exit codes, one line for an error, pipes and interrupts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from btx_testing.commands import CommandServer, clean_environment, run_module, wait_until
from btx_testing.runs import TinyWorld, logged_step

from btx_nemo.cli import _FOLDERS, _parser, main
from btx_nemo.config.load import conf_dir

COMMANDS = (
    *("doctor", "prepare-data", "embed", "train", "mix", "import", "export", "inspect", "verify"),
    *("submit", "status", "logs", "cancel", "stage", "losses"),
    *("plan", "plot", "demo"),
)


def named(command: str) -> str:
    """The configurations of a command."""
    return ", ".join(sorted(path.stem for path in (conf_dir() / command).glob("[!_]*.yaml")))


WRONG = [
    ([], "required: COMMAND"),
    (["frobnicate"], "invalid choice: 'frobnicate'"),
    (["train"], "required: --config-name"),
    (["train", "--config-name", "nope"], "--config-name nope: not in"),
    (
        ["train", "--config-name", "_base"],
        f"; known: {named('train')}\n",
    ),
    (["train", "--config-path", "nowhere", "--config-name", "x"], "known: none"),
    (["train", "--config-name", "expert", "--nope"], "unrecognized arguments: --nope"),
    (["train", "--config-name", "expert"], "domain is required; give domain=VALUE"),
    (["mix", "--config-name", "nope"], f"known: {named('mix')}\n"),
    (["mix", "--config-name", "btx", "out=o"], "experts: none given; name at least one specialist"),
    (["mix", "--config-name", "btx", "out=o", "experts.a=nowhere", "seed=nowhere", "nope=1"], "unknown key nope"),
    (["mix", "--config-name", "btx", "out=o", "experts.a=nowhere", "seed=nowhere"], "nowhere: no such folder"),
    (["import", "in=nowhere", "out=o"], "nowhere: no such folder"),
    (["import", "in=nowhere"], "expected in=DIR out=DIR, got in=nowhere"),
    (["export", "in=nowhere", "out=o"], "nowhere: no such folder"),
    (["import", "in=a", "out=o", "shard_size=1"], "unknown key shard_size; known: in, out, dtype"),
    (["import", "in=a", "in=b", "out=o"], "in is given twice, a and b; give it once"),
    (["export", "in=a", "out=o", "color=red"], "unknown key color; known: in, out, dtype, verify, shard_size"),
    (["export", "in=a", "out=o", "dtype=fp7"], "dtype=fp7: unknown; known: float32, bfloat16, float16"),
    (["export", "in=a", "out=o", "shard_size=5GB"], "shard_size=5GB: must be a positive number of bytes"),
    (["export", "in=a", "out=o", "shard_size=0"], "shard_size=0: must be a positive number of bytes"),
    (["export", "nowhere", "o"], "expected in=DIR out=DIR, got nowhere o"),
    (["inspect", "nowhere"], "nowhere"),
    (["prepare-data", "--out", "o"], "inputs: required, unless --demo"),
    (["prepare-data", "nowhere", "--domain", "a", "--tokenizer", "t", "--out", "o"], "t"),
    (["prepare-data", "x", "--no-eod", "--eod-token", "x", "--out", "o"], "not allowed with argument --no-eod"),
    (
        ["prepare-data", "x", "--domain", "3d", "--tokenizer", "t", "--out", "o"],
        "--domain '3d': only a-z, 0-9, _ and -",
    ),
    (["demo", "--size", "huge"], "invalid choice: 'huge'"),
]


def test_an_empty_folder_in_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all those that the configurations name: elsewhere it would be the current folder, or /."""
    text = "".join(path.read_text() for path in conf_dir().glob("*/*.yaml"))
    assert {*re.findall(r"oc\.env:(\w+)", text)} <= {*_FOLDERS}
    for name in _FOLDERS:
        monkeypatch.setenv(name, "")
    with pytest.raises(SystemExit):
        main(["train", "--config-name", "nope"])
    assert not {*_FOLDERS} & {*os.environ}


def test_the_commands_are_these() -> None:
    """A name that scripts use must not go unnoticed."""
    (action,) = [a for a in _parser()._actions if hasattr(a, "choices") and a.choices]
    assert tuple(action.choices or ()) == COMMANDS


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_shows_an_example_or_the_defaults(commands: CommandServer, command: str) -> None:
    ended = commands.run(*command.split(), "--help")
    assert ended.code == 0
    assert ended.err == ""
    known = ("e.g.", "default", "=DIR", "demo", "debug")
    assert any(word in ended.out for word in known)


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(w[0])[:50] or "nothing" for w in WRONG])
def test_wrong_input_is_one_line(commands: CommandServer, tmp_path: Path, arguments: list[str], message: str) -> None:
    ended = commands.run(*arguments, cwd=tmp_path)
    assert ended.code == 2, ended.err
    assert ended.err.startswith("btx-nemo")
    assert ended.err.count("\n") == 1
    assert message in ended.err
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


def test_every_flag_of_prepare_data_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    from btx_nemo.data import demo, prepare

    calls: list[dict[str, object]] = []
    monkeypatch.setattr(prepare, "prepare_data", lambda *args, **options: calls.append({"args": args, **options}))
    monkeypatch.setattr(demo, "build_demo_data", lambda *args, **options: calls.append({"args": args, **options}))
    common = ["prepare-data", "in", "--domain", "a", "--tokenizer", "t", "--out", "o"]
    plain = {"text_key": "text", "workers": None, "validation_fraction": 0.05, "append_eod": True, "eod_token": None}
    plain |= {"chat": False, "chat_template": None, "messages_key": "messages"}
    args = ([Path("in")], Path("t"), Path("o"), "a")
    main(common)
    assert calls.pop() == {"args": args, **plain, "overwrite": False}
    main([*common, "--no-eod", "--overwrite", "--workers", "3", "--text-key", "k"])
    changed = {"append_eod": False, "overwrite": True, "workers": 3, "text_key": "k"}
    assert calls.pop() == {"args": args, **plain, **changed}
    main([*common, "--eod-token", "<e>"])
    assert calls.pop() == {"args": args, **plain, "eod_token": "<e>", "overwrite": False}
    main([*common, "--chat", "--chat-template", "t.jinja", "--messages-key", "m"])
    chat = {"chat": True, "chat_template": Path("t.jinja"), "messages_key": "m"}
    assert calls.pop() == {"args": args, **plain, **chat, "overwrite": False}
    main(["prepare-data", "--demo", "--out", "o", "--overwrite"])
    assert calls.pop() == {"args": (Path("o"),), "workers": None, "overwrite": True}


def test_import_and_export_take_a_dtype(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    chain = (("import", world.dense, "a", "bfloat16"), ("export", tmp_path / "a", "b", "float16"))
    for command, source, name, dtype in chain:
        ended = commands.run(command, f"in={source}", f"out={tmp_path / name}", f"dtype={dtype}")
        assert (ended.code, ended.err) == (0, "")
        assert json.loads(commands.run("inspect", tmp_path / name, "--json").out)["dtype"] == dtype


def test_a_broken_configuration_file(commands: CommandServer, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("steps: [1, 2\nout: {")
    ended = commands.run("train", "--config-path", tmp_path, "--config-name", "mine")
    assert ended.code == 2
    assert ended.err.startswith("btx-nemo train: ")
    assert ended.err.count("\n") == 1


def test_debug_shows_the_traceback(commands: CommandServer) -> None:
    ended = commands.run("train", "--debug", "--config-name", "nope")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert "UserError" in ended.err


def test_a_reader_that_has_seen_enough(world: TinyWorld) -> None:
    """`btx-nemo inspect DIR | head -0`: the pipe is closed before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "btx_nemo", "inspect", str(world.dense), "--json"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=clean_environment(), timeout=120)
    os.close(writing)
    assert ended.returncode == 141
    assert ended.stderr == b""


def test_an_interrupt_is_no_traceback(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = commands.start(*world.arguments("tiny_expert", out, steps=2000, checkpoint__every=0))
    ended = running.kill_when(lambda: logged_step(out) > 2, signal.SIGINT)
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "btx-nemo train: interrupted"
    assert "Traceback" not in ended.err
    wait_until(lambda: not (out / "DONE").exists())


def test_the_version_comes_quickly() -> None:
    """No command pays for what it does not use: neither torch nor Megatron is imported for this."""
    code = "import sys; from btx_nemo.cli import _parser, main; _parser(); print(sorted(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment())
    assert ended.returncode == 0
    assert not any(f"'{heavy}'" in ended.stdout for heavy in ("torch", "megatron", "transformers", "hydra", "numpy"))
    assert run_module("--version").out.startswith("btx-nemo ")
