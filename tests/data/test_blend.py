"""Blending through Megatron's own builder: proportions, determinism, exact tokens, and every error before training."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from btx_testing import data_jobs
from btx_testing.pool import RankPool
from btx_testing.text import byte_tokenizer, sentence, write_jsonl

from btx_nemo.data.blend import check_data, list_domains, normalise_weights
from btx_nemo.data.datasets import build_datasets
from btx_nemo.data.indexed import open_indexed
from btx_nemo.data.prepare import prepare_data
from btx_nemo.errors import UserError

DOMAINS = ("a", "b", "c")
SEQ = 64


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains; every document of domain a is made of the letter a alone, and so on."""
    root = tmp_path_factory.mktemp("prepared")
    tokenizer = byte_tokenizer(root / "tok")
    rng = Random(0)
    for domain, count in (("a", 60), ("b", 30), ("c", 90)):
        texts = [domain * rng.randint(20, 400) for _ in range(count)]
        train, valid = write_jsonl(root / "t.jsonl", texts), write_jsonl(root / "v.jsonl", texts[:9])
        prepare_data([train], tokenizer, root / "data", domain, workers=1, validation_inputs=[valid])
    return root / "data"


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def build(data: Path, tmp_path: Path, weights: dict[str, float], **change: Any) -> tuple[Any, dict[str, Any]]:
    arguments = {"seq_length": SEQ, "train_samples": 200, "seed": 1, "cache_dir": tmp_path / "cache", **change}
    return build_datasets(data, weights, **arguments)


def letters(data: Path) -> dict[int, str]:
    """Token id of each domain's only letter."""
    return {int(next(iter(open_indexed(data / domain / "train").documents()))[0]): domain for domain in DOMAINS}


def shares(dataset: Any, data: Path, count: int) -> dict[str, float]:
    found, names = dict.fromkeys(DOMAINS, 0), letters(data)
    for index in range(count):
        tokens = dataset[index]["tokens"]
        (domain,) = {names[int(token)] for token in tokens.unique() if int(token) in names}
        found[domain] += 1
    return {domain: number / count for domain, number in found.items()}


@pytest.mark.parametrize(
    "weights", [{"a": 1.0}, {"a": 2, "b": 1}, {"a": 54.27, "b": 13.57, "c": 35.14}, {"a": 0.98, "b": 0.01, "c": 0.01}]
)
def test_proportions_follow_the_weights_whatever_their_sum(
    prepared: Path, tmp_path: Path, weights: dict[str, float]
) -> None:
    train, valid = build(prepared, tmp_path, weights)
    assert len(train) >= 200 and list(valid) == list(weights)
    found = shares(train, prepared, 200)
    for domain in DOMAINS:
        assert found[domain] == pytest.approx(weights.get(domain, 0) / sum(weights.values()), abs=0.011)


@pytest.mark.parametrize("samples", [1, 2, 7, 500])
def test_rare_domains_and_tiny_runs_are_not_oversampled(prepared: Path, tmp_path: Path, samples: int) -> None:
    train, _ = build(prepared, tmp_path, {"a": 0.98, "b": 0.01, "c": 0.01}, train_samples=samples)
    assert len(train) >= samples
    for index in range(samples):
        assert train[index]["tokens"].shape == (SEQ,)


def test_a_blend_that_megatron_itself_would_oversample(tmp_path: Path) -> None:
    """Four one-document domains at weights where Megatron's rounding asks the third for 7 samples and builds 6."""
    tokenizer = byte_tokenizer(tmp_path / "tok")
    for domain in "abcd":
        train, valid = write_jsonl(tmp_path / "t.jsonl", [domain * SEQ]), write_jsonl(tmp_path / "v.jsonl", ["text"])
        prepare_data([train], tokenizer, tmp_path / "data", domain, workers=1, validation_inputs=[valid])
    weights = {"a": 0.01124409, "b": 0.00557101, "c": 0.93447634, "d": 0.04870855}
    train, _ = build(tmp_path / "data", tmp_path, weights, train_samples=5)
    assert len(train) >= 5


def test_ranks_see_one_global_batch_and_share_one_cache(prepared: Path, tmp_path: Path, ranks: RankPool) -> None:
    arguments = {"weights": {"a": 1, "c": 2}, "seq_length": SEQ, "train_samples": 48, "seed": 3}
    common = (str(prepared), str(tmp_path / "cache"), arguments)
    (alone,) = ranks.run(data_jobs.first_batches, *common, 8, 6, ranks=1)
    first, second = ranks.run(data_jobs.first_batches, str(prepared), str(tmp_path / "new"), arguments, 4, 6, ranks=2)
    assert [left + right for left, right in zip(first, second, strict=True)] == alone


def test_samples_are_windows_of_the_text(prepared: Path, tmp_path: Path) -> None:
    """One pass over one domain, against windows cut by hand from Megatron's own document order."""
    tokens = sum(len(ids) for ids in open_indexed(prepared / "b/train").documents())
    train, _ = build(prepared, tmp_path, {"b": 1}, train_samples=(tokens - 1) // SEQ)
    documents = list(open_indexed(prepared / "b/train").documents())
    stream = np.concatenate([documents[index] for index in train.document_index])
    order = np.asarray(train.shuffle_index)
    for index in range(len(train)):
        start = order[index] * SEQ
        item = train[index]
        assert item["tokens"].tolist() == stream[start : start + SEQ].tolist()
        assert item["labels"].tolist() == stream[start + 1 : start + SEQ + 1].tolist()
        assert item["position_ids"].tolist() == list(range(SEQ))
        assert item["loss_mask"].tolist() == [1.0] * SEQ
        assert "attention_mask" not in item


def test_the_order_is_the_seeds_and_validation_does_not_depend_on_it(prepared: Path, tmp_path: Path) -> None:
    def rows(dataset: Any) -> list[list[int]]:
        return [dataset[index]["tokens"].tolist() for index in range(min(len(dataset), 40))]

    (first, valid), (again, _) = (build(prepared, tmp_path / name, {"a": 1, "c": 1}) for name in ("x", "y"))
    cached, _ = build(prepared, tmp_path / "x", {"a": 1, "c": 1})
    other, other_valid = build(prepared, tmp_path / "x", {"a": 1, "c": 1}, seed=2)
    assert rows(first) == rows(again) == rows(cached) != rows(other)
    assert rows(valid["c"]) == rows(other_valid["c"])


def test_validation_is_one_pass_per_domain_limited_and_never_empty(prepared: Path, tmp_path: Path) -> None:
    _, valid = build(prepared, tmp_path, {"a": 1}, domains_for_validation=list(DOMAINS))
    for domain in DOMAINS:
        tokens = open_indexed(prepared / domain / "valid").num_tokens
        assert len(valid[domain]) == (tokens - 1) // SEQ > 2
    _, limited = build(prepared, tmp_path, {"a": 1}, valid_samples=2)
    assert len(limited["a"]) == 2
    _, short = build(prepared, tmp_path, {"b": 1}, seq_length=100_000, train_samples=1)
    (item,) = (short["b"][index] for index in range(len(short["b"])))
    assert item["loss_mask"].sum() == open_indexed(prepared / "b/valid").num_tokens - 1
    assert item["tokens"].min() >= 0 and item["labels"].min() >= 0


def test_a_cache_half_written_by_a_killed_run_is_built_again(prepared: Path, tmp_path: Path) -> None:
    train, _ = build(prepared, tmp_path, {"a": 1, "b": 1})
    expected = [train[index]["tokens"].tolist() for index in range(50)]
    files = sorted((tmp_path / "cache").rglob("*.npy"))
    assert files
    for number, path in enumerate(files):
        if number % 2:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            np.save(path, np.array([{"not": "numbers"}], dtype=object), allow_pickle=True)
    train, _ = build(prepared, tmp_path, {"a": 1, "b": 1})
    assert [train[index]["tokens"].tolist() for index in range(50)] == expected


def test_data_prepared_anew_in_the_same_place_does_not_meet_the_old_cache(data: Path, tmp_path: Path) -> None:
    build(data, tmp_path, {"a": 1})
    texts = write_jsonl(tmp_path / "t.jsonl", [sentence(Random(i)) for i in range(40)])
    valid = write_jsonl(tmp_path / "v.jsonl", ["other text"])
    prepare_data([texts], data / "tokenizer", data, "a", workers=1, validation_inputs=[valid], overwrite=True)
    train, _ = build(data, tmp_path, {"a": 1})
    ids = np.concatenate(list(open_indexed(data / "a/train").documents()))
    for index in range(len(train)):
        assert set(train[index]["tokens"].tolist()) <= set(ids.tolist())


def test_weights() -> None:
    shares = normalise_weights({"a": 82.18, "b": 9.90, "c": 6.93}, DOMAINS)
    assert sum(shares.values()) == pytest.approx(1) and shares["a"] == pytest.approx(82.18 / 99.01)
    bad: list[tuple[dict, str]] = [
        ({}, "empty"),
        ({"zz": 1}, "unknown domain 'zz'; known: a, b, c"),
        ({"a": 0}, "positive"),
        ({"a": -1}, "positive"),
        ({"a": float("nan")}, "positive"),
        ({"a": float("inf")}, "positive"),
        ({"a": "much"}, "positive"),
        ({"a": True}, "positive"),
        ({"a": 1e308, "b": 1e308}, "positive"),
        ({"a": 10**400}, "positive"),
        ({"a": 1, "b": 1e-320}, "data.blend.b=1e-320: less than 1e-06 of the blend; raise it"),
        ({"a": 1, "b": 9e-7}, "less than 1e-06 of the blend"),
    ]
    for weights, message in bad:
        with pytest.raises(UserError, match=message):
            normalise_weights(weights, DOMAINS)


def test_check_data_holds_data_against_the_model(data: Path, tmp_path: Path) -> None:
    metas = check_data(data, DOMAINS, 257)
    assert list(metas) == list(DOMAINS) and metas["a"]["eod_id"] == 0
    check_data(data, DOMAINS, 320)  # padded embedding
    with pytest.raises(UserError, match="has 257 ids, the model 256"):
        check_data(data, DOMAINS, 256)
    with pytest.raises(UserError, match="differs from the model's"):
        check_data(data, DOMAINS, 257, tokenizer_sha256="0" * 64)
    with pytest.raises(UserError, match="no domain 'd'; known: a, b, c"):
        check_data(data, ["d"], 257)
    with pytest.raises(UserError, match="no such folder"):
        check_data(tmp_path / "nowhere", ["a"], 257)
    meta = json.loads((data / "b/meta.json").read_text())
    (data / "b/meta.json").write_text(json.dumps({**meta, "tokenizer_sha256": "1" * 64}))
    with pytest.raises(UserError, match="domain 'b': its tokenizer differs from that of domain 'a'"):
        check_data(data, DOMAINS, 257)
    wrong: list[tuple[str, Any, str]] = [
        ("format", 2, "format is 2"),
        ("domain", "a", "domain is 'a'"),
        ("vocab_size", "257", "vocab_size is '257'"),
        ("vocab_size", True, "vocab_size is True"),
        ("token_dtype", "int32", "token_dtype is int32 but train.idx has uint16"),
        ("token_dtype", "text", "token_dtype is 'text'"),
        ("eod_id", 257, "eod_id is 257"),
        ("eod_id", -1, "eod_id is -1"),
        ("valid", None, "valid is None"),
        ("train", {**meta["train"], "tokens": 5}, "train.tokens is 5 but train.idx has"),
        ("train", {**meta["train"], "documents": 5}, "train.documents is 5 but train.idx has 30"),
    ]
    for key, value, message in wrong:
        (data / "b/meta.json").write_text(json.dumps({**meta, key: value}))
        with pytest.raises(UserError, match=f"b/meta.json: {message}"):
            check_data(data, DOMAINS, 257)
    (data / "b/meta.json").unlink()
    os.mkfifo(data / "b/meta.json")
    with pytest.raises(UserError, match=r"b/meta.json: not a regular file"):
        check_data(data, DOMAINS, 257)
    (data / "b/meta.json").unlink()
    (data / "b/meta.json").write_text('{"domain": "b"')
    with pytest.raises(UserError, match="not valid JSON"):
        check_data(data, DOMAINS, 257)
    (data / "b/meta.json").unlink()
    assert list_domains(data) == ["a", "c"]


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "short":
        content = content[:-1]
    elif kind == "half":
        content = content[: len(content) // 2]
    elif kind == "long":
        content += b"\0\0"
    elif kind == "empty":
        content = bytearray()
    elif kind == "magic":
        content[0:4] = b"PK\3\4"
    elif kind == "huge count":
        content[18:26] = struct.pack("<Q", 2**60)
    elif kind == "length":
        content[34:38] = struct.pack("<i", -5)
    elif kind == "dtype":
        content[17] = 77
    elif kind == "id":
        content[100:102] = struct.pack("<H", 257)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("b/train.idx", "short"),
        ("b/train.idx", "half"),
        ("b/train.idx", "long"),
        ("b/train.idx", "empty"),
        ("b/train.idx", "magic"),
        ("b/train.idx", "huge count"),
        ("b/train.idx", "length"),
        ("b/train.idx", "dtype"),
        ("b/train.bin", "short"),
        ("b/train.bin", "half"),
        ("b/train.bin", "long"),
        ("b/train.bin", "empty"),
        ("b/train.bin", "id"),
        ("b/valid.bin", "half"),
        ("b/valid.idx", "magic"),
    ],
)
def test_damaged_files_are_named_before_training(data: Path, tmp_path: Path, file: str, kind: str) -> None:
    damage(data / file, kind)
    with pytest.raises(UserError) as caught:
        build(data, tmp_path, {"a": 1, "b": 1})
    assert str(data / file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_is_named(data: Path, tmp_path: Path) -> None:
    (data / "b/train.bin").unlink()
    with pytest.raises(UserError, match=r"b/train.bin: missing"):
        build(data, tmp_path, {"b": 1})


def test_bad_sizes(prepared: Path, tmp_path: Path) -> None:
    for change in ({"train_samples": 0}, {"seq_length": 1}, {"valid_samples": 0}):
        with pytest.raises(UserError):
            build(prepared, tmp_path, {"a": 1}, **change)
