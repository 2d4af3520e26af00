"""`inspect` tells what a folder is, and refuses one that is not whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from btx_testing.mixes import write_embeddings
from btx_testing.mixing import SMALL, make_models
from btx_testing.models import make_llama, make_mixtral

from btx_nemo.checkpoints.inspect import inspect_checkpoint, print_inspection
from btx_nemo.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.errors import UserError
from btx_nemo.mix.run import run_mix


def test_each_kind_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_models(tmp_path, "math")
    run_mix(config)
    make_mixtral(tmp_path / "mixtral", **SMALL)
    import_hf(tmp_path / "mix", tmp_path / "run" / "checkpoints" / "step_00000002")
    (tmp_path / "run" / "latest").write_text("step_00000002")
    dense, mix, mixtral, run = (inspect_checkpoint(tmp_path / name) for name in ("seed", "mix", "mixtral", "run"))
    assert (dense["kind"], dense["moe"], dense["made_by"]) == ("Hugging Face folder", None, None)
    assert mix["made_by"]["recipe"] == "btx" and mix["moe"]["num_experts"] == 2
    assert mixtral["moe"]["num_experts"] == 4 and mixtral["made_by"] is None
    assert run["kind"] == "Megatron checkpoint" and run["parameters"] == mix["parameters"]
    assert [expert["name"] for expert in run["moe"]["experts"]] == ["math", "generalist"]
    assert run["training"]["optimizer_state"] is False and run["training"]["finished"] is False
    for facts in (dense, mix, mixtral, run):
        json.dumps(facts)
        print_inspection(facts)
    assert "active per token" in capsys.readouterr().out


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def no_settings(folder: Path) -> None:
    (folder / ("model.json" if (folder / "model.json").exists() else "config.json")).unlink()


def cut(folder: Path) -> None:
    data = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(data, data.stat().st_size - 1)


def gone(folder: Path) -> None:
    max(folder.iterdir(), key=lambda path: path.stat().st_size).unlink()


def nonsense(folder: Path) -> None:
    (folder / MANIFEST).write_text("[" * 100_000)


@pytest.mark.parametrize("damage", [no_manifest, no_settings, cut, gone, nonsense])
@pytest.mark.parametrize("kind", ["mix", "checkpoint"])
def test_what_is_not_whole_is_refused(tmp_path: Path, kind: str, damage: Callable[[Path], None]) -> None:
    config = make_models(tmp_path, "math")
    run_mix(config)
    folder = tmp_path / "mix"
    if kind == "checkpoint":
        import_hf(folder, tmp_path / "checkpoint")
        folder = tmp_path / "checkpoint"
    inspect_checkpoint(folder)
    damage(folder)
    with pytest.raises(UserError) as error:
        inspect_checkpoint(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 10**15}, "num_layers"),
        ({"num_layers": "2"}, "num_layers must be int"),
        ({"head_dim": None}, "head_dim must be int"),
        ({"colour": 3}, "unknown key colour"),
        ({"num_layers": 3}, "no tensor"),
        ({"moe": {"num_experts": 0}}, "num_experts=0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_model_description_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    make_llama(tmp_path / "hf", **SMALL)
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        inspect_checkpoint(tmp_path / "ckpt")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    make_llama(tmp_path / "half", **SMALL)
    (tmp_path / "half" / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    write_embeddings(tmp_path / "embeddings", ("math",))
    for name, message in (
        ("embeddings", "holds the domain embeddings"),
        ("half", "no safetensors weights"),
        ("empty", "no such file"),
        ("nowhere", "no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            inspect_checkpoint(tmp_path / name)


def test_a_manifest_holds_the_files_of_its_folder_only(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    write_manifest(tmp_path, kind="test", extra={"step": 3})
    (tmp_path / "chat_template.jinja").write_text("")  # not named: a new file changes nothing
    assert read_manifest(tmp_path)["step"] == 3
    (tmp_path / "x").write_bytes(b"123")
    with pytest.raises(UserError, match="x: 3 bytes, but"):
        read_manifest(tmp_path)
    (tmp_path / "x").write_bytes(b"4321")
    table = json.loads((tmp_path / MANIFEST).read_text())
    table["files"]["../x"] = {"size": 4}
    (tmp_path / MANIFEST).write_text(json.dumps(table))
    with pytest.raises(UserError, match="outside of its folder"):
        read_manifest(tmp_path)
