"""The demo corpora: sizes, no text in both splits, exact mathematics, a tokenizer that transformers loads."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from btx_nemo.data.blend import check_data
from btx_nemo.data.corpora.code import without_docstrings
from btx_nemo.data.corpora.math import TEMPLATES, problems, verify
from btx_nemo.data.corpora.stdlib import Module, docstring_nodes, stdlib_modules
from btx_nemo.data.demo import DOMAINS, build_demo_data
from btx_nemo.data.demo_chats import LONGEST, build_demo_chats, conversations
from btx_nemo.data.indexed import open_indexed
from btx_nemo.data.tokenizer import load_encoder
from btx_nemo.errors import UserError

SIZE = 0.12


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "data"
    build_demo_data(out, size=SIZE, workers=1)
    return out


def texts(demo: Path, domain: str, split: str) -> list[dict[str, Any]]:
    with (demo / "text" / domain / f"{split}.jsonl").open(encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def test_sizes_and_vocabulary(demo: Path) -> None:
    metas = check_data(demo, DOMAINS, 2048)
    for domain, meta in metas.items():
        total = meta["train"]["bytes"] + meta["valid"]["bytes"]
        assert 0.7 * SIZE < total / 1e6 < 1.1 * SIZE, domain
        assert 0.04 < meta["valid"]["bytes"] / total < 0.12, domain
        assert meta["vocab_size"] == 2048 and meta["eod_id"] == 0
        assert meta["validation_fraction"] is None and not meta["sources"][0]["path"].startswith("/")
    assert len({meta["tokenizer_sha256"] for meta in metas.values()}) == 1


def test_tokens_decode_to_the_text(demo: Path) -> None:
    encoder = load_encoder(demo / "tokenizer")
    for domain in DOMAINS:
        for split in ("train", "valid"):
            decoded = [encoder.decode(ids) for ids in open_indexed(demo / domain / split).documents()]
            assert decoded == [record["text"] for record in texts(demo, domain, split)]


def pieces(domain: str, text: str) -> set[str]:
    """What must not occur twice: a problem, a paragraph; for code, a long run of lines."""
    if domain == "math":
        return {line for line in text.splitlines() if line.startswith("Problem: ")}
    if domain == "prose":
        return {block.strip() for block in text.split("\n\n") if len(block) > 40}
    lines = text.splitlines()
    return {"\n".join(lines[start : start + 12]) for start in range(len(lines) - 12)}


def test_nothing_is_in_training_and_validation(demo: Path) -> None:
    for domain in DOMAINS:
        train, valid = (
            set().union(*(pieces(domain, record["text"]) for record in texts(demo, domain, split)))
            for split in ("train", "valid")
        )
        assert train and valid and not train & valid, domain
        names = [{record["name"] for record in texts(demo, domain, split)} for split in ("train", "valid")]
        assert not names[0] & names[1]


def test_domains_do_not_share_text(demo: Path) -> None:
    """Docstrings are the prose domain's: none of its paragraphs stands in the code."""
    code = " ".join(" ".join(record["text"].split()) for record in texts(demo, "code", "train"))
    prose = set().union(*(pieces("prose", record["text"]) for record in texts(demo, "prose", "train")))
    shared = [block for block in prose if len(block) > 80 and " ".join(block.split()) in code]
    assert not shared


def test_math_answers_agree_with_sympy() -> None:
    sample = list(islice(problems(), 20 * len(TEMPLATES)))
    assert len({problem.key for problem in sample}) == len(sample)
    for problem in sample:
        assert verify(problem), problem.text


def test_the_check_notices_a_wrong_answer() -> None:
    from dataclasses import replace

    wrong = {"solve": "x = 12345", "base": "1", "primes": "2 * 2", "antiderivative": "x^9 + C"}
    for problem in islice(problems(), len(TEMPLATES)):
        assert not verify(replace(problem, answer=wrong.get(problem.kind, "98765"))), problem.text


def test_code_without_docstrings_still_parses_to_the_same_program() -> None:
    def bare(tree: ast.Module) -> str:
        drop = {id(node) for node in docstring_nodes(tree)}
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and id(body[0].value) in drop:
                only = len(body) == 1 and not isinstance(node, ast.Module)
                node.body = [ast.Pass()] if only else body[1:]  # type: ignore[attr-defined]
        return ast.dump(tree)

    for module in islice(stdlib_modules(), 60):
        if ";" not in module.source:  # a docstring that shares its line stays
            assert bare(ast.parse(without_docstrings(module))) == bare(ast.parse(module.source)), module.name


def test_docstrings_are_cut_by_bytes_and_form_feeds_do_not_count_as_lines() -> None:
    source = 'x = 1\n\x0c\nclass A:\n    """é\n    ü"""\n\ndef f():\n    """Only."""\n'
    text = without_docstrings(Module(name="m", source=source, tree=ast.parse(source)))
    assert "é" not in text and "Only" not in text and "x = 1" in text
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse("x = 1\nclass A:\n    pass\n\ndef f():\n    pass\n"))


def test_content_does_not_depend_on_workers_hash_seed_or_threads(demo: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from btx_nemo.data.demo import build_demo_data\n"
        "if __name__ == '__main__':\n"
        f"    build_demo_data(sys.argv[1], size={SIZE}, workers=3)\n"
    )
    (tmp_path / "main.py").write_text(program)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3", "PYTHONPATH": root}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "main.py"), str(tmp_path / "again")]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    files = sorted(path.relative_to(demo) for path in demo.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*"))
    for path in files:
        assert (demo / path).read_bytes() == (tmp_path / "again" / path).read_bytes(), path


def test_transformers_loads_the_tokenizer_and_agrees(demo: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(demo / "tokenizer"), local_files_only=True)
    encoder = load_encoder(demo / "tokenizer")
    assert len(tokenizer) == encoder.vocab_size == 2048
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == encoder.eod_id == 0
    assert tokenizer.pad_token_id == 1 and tokenizer.model_max_length == 2048
    rng = Random(0)
    for domain in DOMAINS:
        for record in texts(demo, domain, "valid")[:3]:
            text = record["text"][: rng.randint(50, 3000)]
            ids = tokenizer(text)["input_ids"]
            assert ids == encoder.encode([text])[0]
            assert tokenizer.decode(ids) == text
    text = "  x  = 1 ,\n\n\tß 中 🙂 ' s <|endoftext|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone(demo: Path) -> None:
    encoder = load_encoder(demo / "tokenizer")
    assert len(encoder.encode(["123456"])[0]) == 6


def test_errors_and_overwriting(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        build_demo_data(demo, size=SIZE)
    for bad in ({"size": "huge"}, {"size": 0.001}, {"size": float("nan")}, {"vocab_size": 10}):
        with pytest.raises(UserError):
            build_demo_data(tmp_path / "x", **{"size": SIZE, **bad})
    with pytest.raises(UserError, match="vocab_size=32000: the text yields only"):
        build_demo_data(tmp_path / "x", size=0.05, vocab_size=32_000, workers=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="x: holds thesis"):
        build_demo_data(tmp_path / "x", size=SIZE, overwrite=True)
    (tmp_path / "x" / "math").mkdir()
    for place in ("text", "math/thesis.tex", "math/train.bin.old"):  # names of the demo's, or below them
        (tmp_path / "x" / "thesis.tex").rename(tmp_path / "x" / place)
        with pytest.raises(UserError, match=f"x: holds {place}"):
            build_demo_data(tmp_path / "x", size=SIZE, overwrite=True)
        (tmp_path / "x" / place).rename(tmp_path / "x" / "thesis.tex")
    (tmp_path / "x" / "thesis.tex").unlink()
    build_demo_data(tmp_path / "x", size=SIZE, overwrite=True, workers=1)
    assert (tmp_path / "x" / "math" / "train.bin").read_bytes() == (demo / "math" / "train.bin").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_is_asked_and_what_is_answered() -> None:
    (chat,) = conversations("math", "Sheet 1\nProblem: 1 + 1?\nSolution: It is 2.\nProblem: no solution")
    assert chat == [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    words = " ".join(map(str, range(500)))
    (chat,) = conversations("prose", f"short\n\n{words}")
    question, answer = (turn["content"] for turn in chat)
    assert question.startswith("Continue: 0 1 2") and answer in words and len(answer) == LONGEST


def test_conversations(demo: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    build_demo_chats(demo, chats, workers=1)
    metas = check_data(chats, DOMAINS, 2048)
    assert {meta["kind"] for meta in metas.values()} == {"chat"}
    assert (chats / "tokenizer" / "tokenizer.json").read_bytes() == (demo / "tokenizer" / "tokenizer.json").read_bytes()
    encoder = load_encoder(demo / "tokenizer")
    for domain in DOMAINS:
        said = encoder.decode(next(iter(open_indexed(chats / domain / "train").documents())))
        assert said.startswith("<user>\n") and "\n<assistant>\n" in said
    with pytest.raises(UserError, match="exists; choose another folder"):
        build_demo_chats(demo, chats)
    with pytest.raises(UserError, match="not there; give the folder that prepare-data --demo"):
        build_demo_chats(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
