"""What tells an output from another: content, not dates or places; and settings by their values."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from btx_nemo.errors import UserError
from btx_nemo.launch.identity import Made, begin, fingerprint, made_of, made_path, put_aside, settings


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
    words += ["optim.offload=0.5", "moe.dispatcher=allgather"]
    same = ["math", "--config-name=expert", "a='b'", "++optim.lr=0.00005", "steps=10", "export=true", "init_from=/x"]
    assert settings(words) == settings(same)
    assert settings(words) != settings([*words, "seed=2"])
    assert settings(["freeze=[a,b]"]) == settings(["freeze=['a', b]"]) != settings(["freeze=[b,a]"])


def test_values_that_cannot_be_read_are_compared_as_they_are() -> None:
    deep = "[" * 5000
    assert settings(["note=2024-13-45", f"a={deep}"]) == {"note": "2024-13-45", "a": deep}


def test_what_goes_along_with_a_model_makes_it_no_other(tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    before = fingerprint(one)
    for name in ("README.md", "LICENSE", ".gitattributes", "figure.png"):
        (one / name).write_text("x")
    assert fingerprint(one) == before
    record_of_old = Made({"from": fingerprint(one, documents=True)}, {})
    assert record_of_old.changed_inputs(Made.now("s", {"from": one}, [])) == []
    (one / "tokenizer.json").write_text("{}")
    assert fingerprint(one) != before


def test_an_input_that_is_not_there_is_no_other(tmp_path: Path) -> None:
    here = Made({"from": "a", "seed": "b"}, {})
    gone = Made({"from": None, "seed": "b"}, {})
    assert here.changed_inputs(gone) == [] and here.missing(gone) == ["from"] and gone.missing(gone) == []
    assert here.changed_inputs(Made({"seed": "c"}, {})) == ["seed", "from"], "one is another, one was left out"
    fresh = Made.now("expert-a", {"from": Path("null")}, [])
    assert fresh.changed_inputs(fresh) == [] and fresh.missing(fresh) == []
    (tmp_path / "empty").mkdir()  # where a disk would be mounted
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.safetensors").symlink_to(tmp_path / "blobs" / "1")
    (tmp_path / "links" / "config.json").write_text("{}")
    assert fingerprint(tmp_path / "empty") is fingerprint(tmp_path / "links") is None


def test_a_run_stays_where_its_input_is_missing(tmp_path: Path) -> None:
    seed, out = make(tmp_path / "seed"), tmp_path / "expert-math"
    (tmp_path / "state").mkdir()

    def again(start: Path = seed) -> None:
        begin(tmp_path, "expert-math", out, {"from": start}, [])

    again()
    make(out)
    text = made_path(tmp_path, "expert-math").read_text()
    seed.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(UserError, match=r"expert-math: the input from is missing: .*seed has no model; bring it"):
            again()
    assert made_path(tmp_path, "expert-math").read_text() == text
    again(tmp_path / "away")
    assert out.exists() and not (tmp_path / "stale").exists()


def test_quotes_are_read_as_hydra_reads_them(tmp_path: Path) -> None:
    seed, out = make(tmp_path / "my seed"), tmp_path / "expert-math"
    (tmp_path / "state").mkdir()
    for word in (f"'{seed}'", f'"{seed}"', f'"{seed}"'):
        begin(tmp_path, "expert-math", out, {"from": Path(word)}, [f"init_from={word}", "steps=2"])
        out.mkdir(exist_ok=True)
        (out / "x").touch()
    assert not (tmp_path / "stale").exists()


CONFIG = """
stage: expert
out: ???
domain: null
init_from: null
data: {path: "${oc.env:BTX_DATA,runs/data}"}
steps: 100
micro_batch_size: 1
global_batch_size: 4
optim: {lr: 1.0e-3}
"""


def test_an_edited_configuration_is_noticed_and_a_copied_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BTX_CLI", raising=False)
    (tmp_path / "state").mkdir()
    out = tmp_path / "expert-math"
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.yaml").write_text(CONFIG)

    def again(folder: str, *words: str) -> None:
        path = f"--config-path={tmp_path / folder}"
        begin(tmp_path, "expert-math", out, {}, ["--config-name=mine", path, *words])

    same = ["optim.offload=0.5", "moe.dispatcher=allgather", "moe.experts=grouped"]
    again("one", "layout.tp=2")
    make(out)
    again("two", "steps=100", "log_every=7", *same)
    monkeypatch.setenv("BTX_DATA", "/elsewhere")
    again("one")
    with pytest.raises(UserError, match="was made with steps=100, now 200; go back"):
        again("one", "steps=200")
    (tmp_path / "one" / "mine.yaml").write_text(CONFIG.replace("lr: 1.0e-3", "lr: 2e-3"))
    with pytest.raises(UserError, match=r"was made with optim.lr=0.001, now 0.002"):
        again("one")
    with pytest.raises(UserError, match=r"data.path=unset, now \S*/d\S*; optim.lr=0.001, now 0.002"):
        again("one", "data.path=/d")
    (tmp_path / "one" / "mine.yaml").unlink()
    again("one")  # the command itself will say that it is gone
    again("two")
    made = json.loads(made_path(tmp_path, "expert-math").read_text())
    made["composed"]["of_an_older_version"] = "1"
    del made["composed"]["optim.eps"]
    made_path(tmp_path, "expert-math").write_text(json.dumps(made))
    again("two")  # settings that one version alone has say nothing
    del made["composed"]
    made_path(tmp_path, "expert-math").write_text(json.dumps(made))
    again("two")
    assert "composed" in json.loads(made_path(tmp_path, "expert-math").read_text()), "a record without is completed"


def test_a_linked_run_is_put_aside_whole(tmp_path: Path) -> None:
    make(tmp_path / "disk" / "run")
    (tmp_path / "runs" / "state").mkdir(parents=True)
    out = tmp_path / "runs" / "joint"
    out.symlink_to("../disk/run")
    aside = put_aside(tmp_path / "runs", "joint", out)
    assert (aside / "config.json").exists() and not os.path.lexists(out)


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
    with pytest.raises(UserError, match="damaged; remove it, and mix is taken as it is"):
        again("top_k=2")
    (runs / "state" / "mix.made.json").write_text("{}")
    with pytest.raises(UserError, match="damaged; remove it"):
        again("top_k=2")


def test_what_was_made_without_a_script_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    out = make(tmp_path / "expert-math")
    begin(tmp_path, "expert-math", out, {}, ["steps=1"])
    assert made_of(tmp_path, "expert-math") is None and out.exists()


def test_a_configuration_that_starts_from_elsewhere_says_so_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: the script knows the seed, the file of conf/ another model. What is recorded must be what is read."""
    monkeypatch.delenv("BTX_CLI", raising=False)
    monkeypatch.setenv("BTX_RUNS", str(tmp_path))
    (tmp_path / "state").mkdir()
    seed, pair, out = make(tmp_path / "seed"), make(tmp_path / "pair-math"), tmp_path / "expert-math"
    monkeypatch.setenv("BTX_SEED", str(seed))

    def start(name: str, *words: str) -> None:
        begin(tmp_path, "expert-math", out, {"from": seed}, [f"--config-name={name}", *words])

    start("tiny_expert")
    with pytest.raises(UserError, match=rf"starts from {pair}, .* would record {seed}; give init_from={pair} among"):
        start("tiny_bar_midtrain")
    with pytest.raises(UserError, match=r"starts from nothing, .* give init_from=null among"):
        start("tiny_seed")
    start("tiny_bar_midtrain", f"init_from='{pair}'")
    then = made_of(tmp_path, "expert-math")
    assert then is not None and then.inputs == {"from": fingerprint(pair)}
