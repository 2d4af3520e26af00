"""What tells an output from another: content, not dates or places; and settings by their values."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from btx_nemo.errors import UserError
from btx_nemo.launch.identity import HARMLESS, Made, begin, fingerprint, made_of, settings
from btx_nemo.train.prepare import MAY_CHANGE


def make(folder: Path, size: int = 1000, fill: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes([fill]) * size)
    return folder


def test_a_copy_is_the_same_and_every_change_is_another(tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    shutil.copytree(one, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    (tmp_path / "copy" / "manifest.json").write_text("where it came from")
    assert fingerprint(one) == fingerprint(tmp_path / "copy")
    others = [make(tmp_path / "b", fill=2), make(tmp_path / "c", size=1001), make(tmp_path / "d")]
    (others[2] / "config.json").rename(others[2] / "renamed.json")
    prints = {fingerprint(folder) for folder in (one, *others)}
    assert len(prints) == 4 and None not in prints
    assert fingerprint(tmp_path / "nothing") is None


@pytest.mark.parametrize("blocks", [1, 1023, 1024, 1500, 3000])
def test_a_large_file_is_sampled_from_end_to_end(blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("btx_nemo.launch.identity.BLOCK", 16)
    folder = make(tmp_path / "m", size=16 * blocks + 3)
    before, path = fingerprint(folder), folder / "model.safetensors"
    for offset in (0, 16 * blocks + 2):
        whole = bytearray(path.read_bytes())
        whole[offset] ^= 1
        path.write_bytes(whole)
        assert fingerprint(folder) != before
        whole[offset] ^= 1
        path.write_bytes(whole)
    path.write_bytes(bytes(16 * blocks + 3))
    assert fingerprint(folder) != before


def test_a_run_is_its_export_or_else_its_latest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make(run / "checkpoints" / "step_1", fill=3)
    (run / "latest").write_text("step_1\n")
    assert fingerprint(run) == fingerprint(run / "checkpoints" / "step_1")
    make(run / "hf", fill=4)
    assert fingerprint(run) == fingerprint(run / "hf")


def test_settings_are_compared_by_value_and_the_harmless_ones_not_at_all() -> None:
    words = ["math", "--config-name=expert", "optim.lr=5e-5", "steps=10", "layout.tp=2", "checkpoint.every=5", "a=b"]
    same = ["math", "--config-name=expert", "a='b'", "++optim.lr=0.00005", "steps=10", "export=true", "init_from=/x"]
    assert settings(words) == settings(same)
    assert settings(words) != settings([*words, "seed=2"])
    assert settings(["freeze=[a,b]"]) == settings(["freeze=['a', b]"]) != settings(["freeze=[b,a]"])
    assert set(HARMLESS) <= set(MAY_CHANGE)


def test_what_an_input_that_is_not_there_is_worth() -> None:
    nothing = Made({"from": None}, {})
    assert nothing.changed_inputs(nothing) == ["from"], "no model is not the same model"
    fresh = Made.now({"from": Path("null")}, [])
    assert fresh.changed_inputs(fresh) == []


def test_begin(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "runs" / "mix"
    (runs / "state").mkdir(parents=True)
    source = make(tmp_path / "a")

    def again(*arguments: str) -> None:
        begin(runs, "mix", out, {"expert-a": source}, arguments)

    again("top_k=1")
    again("top_k=2")  # nothing is there yet
    out.mkdir()
    again("top_k=1")  # still nothing
    (out / "x").touch()
    again("top_k=1")
    with pytest.raises(UserError, match=r"mix: was made with top_k=1, now 2; go back .* --redo mix"):
        again("top_k=2")
    shutil.rmtree(source)
    make(source, fill=9)
    again("top_k=2")
    assert (runs / "stale" / "mix.1" / "x").exists() and not out.exists()
    then = made_of(runs, "mix")
    assert then is not None and then.settings == {"top_k": "2"}
    (runs / "state" / "mix.made.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON table"):
        again("top_k=2")
    (runs / "state" / "mix.made.json").write_text("{}")
    with pytest.raises(UserError, match="damaged; remove it"):
        again("top_k=2")


def test_what_was_made_without_a_script_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    out = make(tmp_path / "expert-math")
    begin(tmp_path, "expert-math", out, {}, ["steps=1"])
    assert made_of(tmp_path, "expert-math") is None and out.exists()
