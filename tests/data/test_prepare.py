"""prepare-data: nothing of the text is lost, nothing depends on the workers, nothing half-written stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from btx_testing.text import byte_tokenizer, sentence, write_folder, write_jsonl

from btx_nemo.data import sources
from btx_nemo.data.indexed import open_indexed
from btx_nemo.data.prepare import prepare_data
from btx_nemo.data.tokenizer import load_encoder
from btx_nemo.errors import UserError


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path / "tok")


def documents(out: Path, domain: str, split: str, tokenizer: Path, *, eod: bool = True) -> list[str]:
    encoder = load_encoder(tokenizer)
    texts = []
    for ids in open_indexed(out / domain / split, vocab_size=encoder.vocab_size).documents():
        if eod:
            assert ids[-1] == encoder.eod_id and (ids[:-1] != encoder.eod_id).all()
        texts.append(encoder.decode(ids.tolist()))
    return texts


@pytest.mark.parametrize("append_eod", [True, False])
def test_folder_round_trip_and_split_by_file(tmp_path: Path, tokenizer: Path, append_eod: bool) -> None:
    texts = write_folder(tmp_path / "in", 30)
    meta = prepare_data(
        [tmp_path / "in"], tokenizer, tmp_path / "out", "d", workers=1, validation_fraction=0.2, append_eod=append_eod
    )
    train = documents(tmp_path / "out", "d", "train", tokenizer, eod=append_eod)
    valid = documents(tmp_path / "out", "d", "valid", tokenizer, eod=append_eod)
    assert sorted(train + valid) == sorted(texts.values())
    assert 0 < sum(map(len, valid)) <= 0.2 * sum(map(len, texts.values()))
    order = [texts[name] for name in sorted(texts)]
    assert train == [text for text in order if text in set(train)], "documents keep the order of their paths"
    assert meta == json.loads((tmp_path / "out/d/meta.json").read_text())
    for split, found in (("train", train), ("valid", valid)):
        assert meta[split]["documents"] == len(found)
        assert meta[split]["bytes"] == sum(len(text.encode()) for text in found)
        assert meta[split]["tokens"] == meta[split]["bytes"] + append_eod * len(found)


def test_megatron_reads_the_same_documents(tmp_path: Path, tokenizer: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    write_folder(tmp_path / "in", 12)
    prepare_data([tmp_path / "in"], tokenizer, tmp_path / "out", "d", workers=1, validation_fraction=0.2)
    prefix = tmp_path / "out/d/train"
    theirs, ours = IndexedDataset(str(prefix)), list(open_indexed(prefix).documents())
    assert len(theirs) == len(ours) and theirs.index.dtype == np.uint16
    assert all((theirs[index] == ids).all() for index, ids in enumerate(ours))


def test_jsonl_split_by_hash_is_bit_identical_for_any_worker_count(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TASK_BYTES", 5000)  # lines longer and shorter than a piece, many borders inside lines
    rng = Random(1)
    texts = [sentence(rng, rng.choice((1, 5, 40, 900))) for _ in range(120)]
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    for workers in (1, 3):
        prepare_data([path], tokenizer, tmp_path / "out", f"w{workers}", workers=workers, validation_fraction=0.2)
    for name in ("train.bin", "train.idx", "valid.bin", "valid.idx"):
        assert (tmp_path / "out/w1" / name).read_bytes() == (tmp_path / "out/w3" / name).read_bytes()
    train = documents(tmp_path / "out", "w1", "train", tokenizer)
    valid = documents(tmp_path / "out", "w1", "valid", tokenizer)
    assert train + valid and not set(train) & set(valid)
    assert [text for text in texts if text in set(train)] == train
    assert [text for text in texts if text in set(valid)] == valid


def test_equal_files_and_equal_documents_stay_in_one_split(tmp_path: Path, tokenizer: Path) -> None:
    write_folder(tmp_path / "in", 20)
    write_folder(tmp_path / "in/copy", 20)
    texts = [sentence(Random(number % 40)) for number in range(200)]
    for name, inputs in (("files", tmp_path / "in"), ("lines", write_jsonl(tmp_path / "in.jsonl", texts))):
        prepare_data([inputs], tokenizer, tmp_path / "out", name, workers=1, validation_fraction=0.3)
        train, valid = (set(documents(tmp_path / "out", name, split, tokenizer)) for split in ("train", "valid"))
        assert valid and not train & valid


def test_single_text_file_is_cut_at_a_paragraph(tmp_path: Path, tokenizer: Path) -> None:
    rng = Random(0)
    text = "\n\n".join(sentence(rng) for _ in range(50))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    prepare_data([tmp_path / "book.txt"], tokenizer, tmp_path / "out", "d", workers=1, validation_fraction=0.1)
    (train,) = documents(tmp_path / "out", "d", "train", tokenizer)
    (valid,) = documents(tmp_path / "out", "d", "valid", tokenizer)
    assert train + valid == text and train.endswith("\n\n")
    assert 0.03 < len(valid) / len(text) <= 0.1


def test_bom_crlf_and_empty_documents(tmp_path: Path, tokenizer: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_bytes(b'\xef\xbb\xbf{"t": "one\\r\\ntwo"}\r\n\r\n{"t": ""}\n{"t": " \\n"}\n{"t": "three"}')
    (tmp_path / "v.txt").write_bytes(b"\xef\xbb\xbfline\r\nline")
    prepare_data(
        [train], tokenizer, tmp_path / "out", "d", text_key="t", workers=1, validation_inputs=[tmp_path / "v.txt"]
    )
    assert documents(tmp_path / "out", "d", "train", tokenizer) == ["one\r\ntwo", "three"]
    assert documents(tmp_path / "out", "d", "valid", tokenizer) == ["line\r\nline"]


def test_dtype_follows_the_vocabulary(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", 6)
    for extra, size in ((0, 2), (66_000, 4)):
        tokenizer = byte_tokenizer(tmp_path / f"tok{extra}", extra=extra)
        out = tmp_path / f"out{extra}"
        meta = prepare_data([tmp_path / "in"], tokenizer, out, "d", workers=1, validation_fraction=0.3)
        assert (out / "d/train.bin").stat().st_size == size * meta["train"]["tokens"]


def test_long_documents_are_not_cut_by_the_tokenizers_own_limit(tmp_path: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    limited = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    limited.enable_truncation(16)
    limited.enable_padding(length=64)
    limited.save(str(tokenizer / "tokenizer.json"))
    texts = write_folder(tmp_path / "in", 6)
    meta = prepare_data([tmp_path / "in"], tokenizer, tmp_path / "out", "d", workers=1, validation_fraction=0.3)
    assert meta["train"]["bytes"] + meta["valid"]["bytes"] == sum(len(text.encode()) for text in texts.values())
    assert meta["train"]["tokens"] == meta["train"]["bytes"] + meta["train"]["documents"]


def test_tokenizer_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]", "a", "b", "c"]))
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for number, text in enumerate(("a b c", "c b a")):
        (tmp_path / f"{number}.txt").write_text(text)
    inputs = [tmp_path / "0.txt"], [tmp_path / "1.txt"]
    prepare_data(inputs[0], folder, tmp_path / "out", "d", workers=1, validation_inputs=inputs[1])
    assert [ids.tolist() for ids in open_indexed(tmp_path / "out/d/train").documents()] == [[6, 7, 8, 5]]


def bad_inputs(tmp_path: Path) -> dict[str, tuple[dict, str]]:
    """name -> (arguments that differ, part of the message)."""
    (tmp_path / "latin.txt").write_bytes("line\nline\ncafé\n".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": "b"}\nnot json\n')
    (tmp_path / "key.jsonl").write_text('{"text": "a"}\n\n{"content": "b"}\n')
    (tmp_path / "type.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "deep.jsonl").write_text("[" * 200_000 + "\n")
    (tmp_path / "surrogate.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n ")
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "none").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    return {
        "missing": ({"inputs": [tmp_path / "nowhere"]}, "nowhere"),
        "nothing": ({"inputs": []}, "nothing given"),
        "fifo": ({"inputs": [tmp_path / "pipe"]}, "not a regular file"),
        "twice": ({"inputs": [tmp_path / "one.jsonl"] * 2}, "one.jsonl: given twice"),
        "folder and file": ({"inputs": [tmp_path / "in", tmp_path / "in/0/file00.txt"]}, "file00.txt: given twice"),
        "empty folder": ({"inputs": [tmp_path / "none"]}, "no file"),
        "no tokens": ({"inputs": [tmp_path / "empty.txt", tmp_path / "blank.txt"]}, "no tokens"),
        "not utf-8": ({"inputs": [tmp_path / "latin.txt"]}, "latin.txt:3: not UTF-8"),
        "not json": ({"inputs": [tmp_path / "bad.jsonl"]}, "bad.jsonl:3: not JSON"),
        "no key": (
            {"inputs": [tmp_path / "key.jsonl"]},
            "key.jsonl:3: no key 'text' (found: content); name it with --text-key",
        ),
        "not text": ({"inputs": [tmp_path / "type.jsonl"]}, "type.jsonl:1: 'text' is int"),
        "not object": ({"inputs": [tmp_path / "list.jsonl"]}, "list.jsonl:1"),
        "deep": ({"inputs": [tmp_path / "deep.jsonl"]}, "deep.jsonl:1: not JSON"),
        "surrogate": ({"inputs": [tmp_path / "surrogate.jsonl"]}, "surrogate.jsonl:1"),
        "empty split": ({"inputs": [tmp_path / "one.jsonl"]}, "split is empty"),
        "no tokenizer": ({"tokenizer": tmp_path / "none"}, "no tokenizer there"),
        "broken tokenizer": ({"tokenizer": tmp_path / "broken"}, "damaged"),
        "eod": ({"eod_token": "<nope>"}, "--eod-token '<nope>': "),
        "name": ({"domain": "Math!"}, "--domain 'Math!': only a-z, 0-9, _ and - are allowed, a letter first"),
        "path": ({"domain": "../x"}, "a letter first; rename the domain"),
        "digit": ({"domain": "3d"}, "--domain '3d': only a-z, 0-9, _ and - are allowed, a letter first"),
        "reserved": ({"domain": "tokenizer"}, "--domain 'tokenizer': has another meaning"),
        "fraction": ({"validation_fraction": 1.0}, "--validation-fraction 1.0"),
        "workers": ({"workers": 0}, "--workers 0"),
        "overlap": ({"validation_inputs": [tmp_path / "in"]}, "also a training input"),
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_user_errors_are_one_line_and_leave_nothing(
    tmp_path: Path, tokenizer: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "in", 5)
    good = {"inputs": [tmp_path / "in"], "tokenizer": tokenizer, "domain": "d", "workers": workers}
    cases = bad_inputs(tmp_path)
    if workers > 1:  # a worker's error must arrive as it is: one case is enough for the transport
        monkeypatch.setattr(sources, "TASK_BYTES", 20)
        second = tmp_path / "in/other.jsonl"
        second.write_text('{"text": "a"}\n' * 10)
        cases = {"not json": ({"inputs": [tmp_path / "bad.jsonl", second]}, "bad.jsonl:3: not JSON")}
    for name, (change, message) in cases.items():
        arguments = {**good, **change}
        with pytest.raises(UserError) as caught:
            prepare_data(out_dir=tmp_path / "out", **arguments)
        assert message in str(caught.value), name
        assert "\n" not in str(caught.value), name
        out = tmp_path / "out"
        assert not out.exists(), name


def test_existing_output_and_another_tokenizer_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    write_folder(tmp_path / "in", 6)
    run = {"inputs": [tmp_path / "in"], "out_dir": tmp_path / "out", "workers": 1, "validation_fraction": 0.3}
    prepare_data(tokenizer=tokenizer, domain="a", **run)
    before = (tmp_path / "out/a/train.bin").read_bytes()
    with pytest.raises(UserError, match=r"exists.*--overwrite"):
        prepare_data(tokenizer=tokenizer, domain="a", **run)
    other = byte_tokenizer(tmp_path / "other", extra=1)
    with pytest.raises(UserError, match="another tokenizer"):
        prepare_data(tokenizer=other, domain="b", **run)
    write_folder(tmp_path / "in", 6, seed=9)
    with pytest.raises(UserError):  # a failing overwrite keeps the old domain
        prepare_data(**{**run, "inputs": [tmp_path / "tok/none"]}, tokenizer=tokenizer, domain="a", overwrite=True)
    assert (tmp_path / "out/a/train.bin").read_bytes() == before
    prepare_data(tokenizer=tokenizer, domain="a", overwrite=True, **run)
    assert (tmp_path / "out/a/train.bin").read_bytes() != before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "tokenizer"]


def test_overwrite_deletes_nothing_but_a_domain(tmp_path: Path, tokenizer: Path) -> None:
    write_folder(tmp_path / "in", 6)
    out = tmp_path / "out"
    run = {"inputs": [tmp_path / "in"], "out_dir": out, "workers": 1, "validation_fraction": 0.3}
    prepare_data(tokenizer=tokenizer, domain="good", **run)
    (out / "thesis").mkdir()
    (out / "thesis/thesis.txt").write_text("years")
    (out / "foreign").mkdir()
    (out / "foreign/meta.json").write_text('{"title": "mine"}')
    (out / "file").write_text("x")
    (out / "empty").mkdir()
    os.symlink("good", out / "link")
    os.symlink("nowhere", out / "dangling")
    (out / "good/notes.txt").write_text("x")

    def held() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    before = held()
    for domain in ("thesis", "foreign", "file", "empty", "link", "dangling", "good"):
        with pytest.raises(UserError, match=f"out/{domain}: .*so --overwrite leaves it"):
            prepare_data(tokenizer=tokenizer, domain=domain, overwrite=True, **run)
    for domain in ("text", "tokenizer"):
        with pytest.raises(UserError, match="has another meaning"):
            prepare_data(tokenizer=tokenizer, domain=domain, overwrite=True, **run)
    assert held() == before
    (out / "good/notes.txt").unlink()
    prepare_data(tokenizer=tokenizer, domain="good", overwrite=True, **run)


def test_killed_run_leaves_no_domain_and_the_next_one_cleans_up(tmp_path: Path, tokenizer: Path) -> None:
    write_folder(tmp_path / "in", 6)
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from btx_nemo.data import prepare\n"
        "def stall(*_):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "prepare._check_counts = stall\n"  # every file but meta.json is written by then
        "root = Path(sys.argv[1])\n"
        "prepare.prepare_data([root / 'in'], root / 'tok', root / 'out', 'd', workers=1, validation_fraction=0.3)\n"
    )
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "out/d").exists() and len(list((tmp_path / "out").glob(".d.tmp-*"))) == 1
    time.sleep(0.1)
    prepare_data([tmp_path / "in"], tokenizer, tmp_path / "out", "d", workers=1, validation_fraction=0.3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["d", "tokenizer"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [sentence(Random(number)) for number in range(2000)])
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from btx_nemo.data import prepare, sources\n"
        "def stall(scratch, encoded, *_):\n"
        "    next(iter(encoded))\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    sources.TASK_BYTES = 20_000\n"
        "    prepare._write = stall\n"
        "    root = Path(sys.argv[1])\n"
        "    prepare.prepare_data([root / 'in.jsonl'], root / 'tok', root / 'out', 'd', workers=2)\n"
    )
    (tmp_path / "main.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "main.py"), str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    assert len(workers) >= 2
    child.kill()
    child.wait()
    deadline = time.monotonic() + 20
    while any(running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [worker for worker in workers if running(worker)]


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_importing_prepare_loads_neither_torch_nor_megatron() -> None:
    program = "import sys, btx_nemo.data.prepare, btx_nemo.data.demo, btx_nemo.data.blend; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "'numpy'" in loaded and "'torch'" not in loaded and "megatron.core" not in loaded
