"""Embeddings with different rows: refused, padded, or joined by the names of added tokens."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.mixing import SMALL, add_tokenizer, make_models, mix_arguments
from btx_testing.models import hf_logits, make_llama
from btx_testing.tensors import load_folder, same_bits, temporaries

from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.errors import UserError
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix
from btx_nemo.mix.vocabulary import runs

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WORDS = 90


def resize(root: Path, name: str, rows: int) -> None:
    number = ("seed", "math", "code").index(name)
    make_llama(root / name, seed=10 + number, **{**SMALL, "vocab_size": rows})


def add(folder: Path, *tokens: str, start: int = WORDS, decoder: bool = True) -> None:
    """Adds tokens after the words, as transformers writes them."""
    entries = [
        {"id": start + i, "content": token, "special": True, "lstrip": False, "rstrip": False,
         "single_word": False, "normalized": False}
        for i, token in enumerate(tokens)
    ]  # fmt: skip
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens": entries}))
    if decoder:
        path = folder / "tokenizer_config.json"
        table = {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in entries}
        path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": table}))


def union_models(root: Path) -> MixConfig:
    """The seed has <a>; math has <a> <m>; code has <c> <a>, in the other order, and one row fewer than the seed."""
    config = make_models(root, "math", "code")
    resize(root, "code", 92)
    resize(root, "math", 100)
    for name, tokens in (("seed", ("<a>",)), ("math", ("<a>", "<m>")), ("code", ("<c>", "<a>"))):
        add(root / name, *tokens)
    return dataclasses.replace(config, vocab_policy="union")


def test_runs_of_rows() -> None:
    assert runs([(0, 0), (0, 1), (1, 2), (1, 3), (0, 4), (0, 3)]) == [(0, 0, 2), (1, 2, 4), (0, 4, 5), (0, 3, 4)]


def test_padded_rows_come_from_the_first_model_that_has_them(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math", "code")
    resize(tmp_path, "math", 100)
    resize(tmp_path, "code", 104)
    with pytest.raises(UserError, match=r"math: vocab_size=100 but the seed .* has 96"):
        run_mix(config)
    run_mix(dataclasses.replace(config, vocab_policy="pad"))
    mixed, seed, math, code = (load_folder(tmp_path / name) for name in ("mix", "seed", "math", "code"))
    for name in (EMBEDDING, HEAD):
        assert mixed[name].shape == (104, 32)
        head = (math[name][:96] + code[name][:96] + seed[name]) / 3
        middle = (math[name][96:100] + code[name][96:100] + math[name][96:100]) / 3  # the seed lacks them: math's
        assert torch.equal(mixed[name], torch.cat([head, middle, sum([code[name][100:]] * 3) / 3]))
    assert json.loads((tmp_path / "mix" / "config.json").read_text())["vocab_size"] == 104
    assert hf_logits(tmp_path / "mix", torch.tensor([[3, 99, 103]])).shape[-1] == 104


def test_a_union_joins_added_tokens_by_name(tmp_path: Path) -> None:
    config = union_models(tmp_path)
    with pytest.raises(UserError, match=r"code: vocab_size=92|math: vocab_size=100"):
        run_mix(dataclasses.replace(config, vocab_policy="error"))
    run_mix(config)
    mixed, seed, math, code = (load_folder(tmp_path / name) for name in ("mix", "seed", "math", "code"))
    for name in (EMBEDDING, HEAD):
        expected = (math[name][:90] + code[name][:90] + seed[name][:90]) / 3
        a = (math[name][90] + code[name][91] + seed[name][90]) / 3
        only_math, only_code = math[name][91], code[name][90]
        rows = mixed[name]
        assert rows.shape == (96, 32), "the seed's padding has room for both"
        assert torch.equal(rows[:90], expected) and torch.equal(rows[90], a)
        for row, one in ((rows[91], only_math), (rows[92], only_code)):
            assert torch.equal(row, (one + one + one) / 3)
        assert torch.equal(rows[93], (math[name][93] + seed[name][93] + seed[name][93]) / 3)
    names = [(e["id"], e["content"]) for e in json.loads((tmp_path / "mix/tokenizer.json").read_text())["added_tokens"]]
    assert names == [(90, "<a>"), (91, "<m>"), (92, "<c>")]


def test_the_joined_tokenizer_works(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = union_models(tmp_path)
    (tmp_path / "seed" / "added_tokens.json").write_text('{"<a>": 90}')
    run_mix(config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "mix")
    assert tokenizer.convert_tokens_to_ids(["w5", "<a>", "<m>", "<c>"]) == [5, 90, 91, 92]
    assert tokenizer("<c><m>", add_special_tokens=False)["input_ids"] == [92, 91]
    assert json.loads((tmp_path / "mix/added_tokens.json").read_text()) == {"<a>": 90, "<m>": 91, "<c>": 92}


def test_more_tokens_than_rows_make_more_rows(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math")
    resize(tmp_path, "math", 110)
    add(tmp_path / "math", *(f"<{i}>" for i in range(20)))
    run_mix(dataclasses.replace(config, vocab_policy="union"))
    mixed, math = load_folder(tmp_path / "mix"), load_folder(tmp_path / "math")
    assert torch.equal(mixed[EMBEDDING][90:], math[EMBEDDING][90:]) and len(mixed[EMBEDDING]) == 110


def test_megatron_sources_and_results_are_joined_alike(tmp_path: Path) -> None:
    config = union_models(tmp_path)
    run_mix(config)
    import_hf(tmp_path / "code", tmp_path / "code_megatron")
    experts = {**config.experts, "code": str(tmp_path / "code_megatron")}
    run_mix(dataclasses.replace(config, experts=experts, format="megatron", out=str(tmp_path / "mix2")))
    export_hf(tmp_path / "mix2", tmp_path / "mix3")
    assert same_bits(load_folder(tmp_path / "mix"), load_folder(tmp_path / "mix3"))
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("mix", "mix2/tokenizer", "mix3")]
    assert files[0] == files[1] == files[2]


def other_base(root: Path, config: MixConfig) -> MixConfig:
    add_tokenizer(root / "code", w17=18, w18=17)
    return config


def no_tokenizer(root: Path, config: MixConfig) -> MixConfig:
    (root / "code" / "tokenizer.json").unlink()
    return config


def beyond(root: Path, config: MixConfig) -> MixConfig:
    add(root / "code", *(f"<{i}>" for i in range(20)))
    return config


def tied(root: Path, config: MixConfig) -> MixConfig:
    make_llama(root / "code", seed=3, **{**SMALL, "tie_word_embeddings": True})
    return config


def unknown(root: Path, config: MixConfig) -> MixConfig:
    return dataclasses.replace(config, vocab_policy="guess")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_base, "code/tokenizer.json: token 'w17' is id 18 but id 17 .*joins added tokens only"),
        (no_tokenizer, "code: vocab_policy=union needs its tokenizer.json"),
        (beyond, "code/tokenizer.json: token '<19>' has id 109 but the embedding has 92 rows"),
        (tied, r"code: (tie_word|has no tensor 'lm_head)"),
        (unknown, "vocab_policy=guess: unknown; known: error, pad, union"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_joined_is_refused(tmp_path: Path, commands: CommandServer, change, message: str) -> None:
    config = change(tmp_path, union_models(tmp_path))
    ended = commands.run(*mix_arguments(config))
    assert ended.code == 2 and ended.err.count("\n") == 1 and re.search(message, ended.err), ended.err
    assert not (tmp_path / "mix").exists() and temporaries(tmp_path) == []
