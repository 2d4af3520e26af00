"""Small texts and tokenizers for tests of the data side."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

WORDS = "the a mixture of experts routes each token to two feed-forward blocks and adds é ü 中 🙂".split()  # noqa: SIM905


def sentence(rng: Random, words: int = 30) -> str:
    """Random words, some of them beyond ASCII."""
    return " ".join(rng.choices(WORDS, k=words)) + ".\n"


def byte_tokenizer(folder: Path, *, extra: int = 0) -> Path:
    """A byte-level tokenizer folder: `<|endoftext|>` = 0, then the 256 bytes, then `extra` more tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<x{i}>" for i in range(extra))]
    vocab = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    """One document a line."""
    path.write_text("".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


def write_folder(folder: Path, count: int, seed: int = 0) -> dict[str, str]:
    """Text files in nested folders; returns {relative path: text}."""
    rng, texts = Random(seed), {}
    for number in range(count):
        name = f"{number % 3}/file{number:02d}.txt"
        texts[name] = "".join(sentence(rng) for _ in range(rng.randint(1, 12)))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(texts[name], encoding="utf-8", newline="")
    return texts
