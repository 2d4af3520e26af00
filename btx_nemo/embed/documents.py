"""A domain's documents as token ids, from prepared data or from text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from btx_nemo.data.blend import load_meta
from btx_nemo.data.indexed import open_indexed
from btx_nemo.data.sources import find_sources, plan_tasks, read_piece
from btx_nemo.data.tokenizer import load_encoder, tokenizer_hash
from btx_nemo.errors import UserError


def documents(path: Path, tokenizer: Path, vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Up to `count` documents of at most `length` tokens, spread evenly over a prepared domain, or the first of a text.

    `path` is a domain's folder that prepare-data wrote, or a text or JSONL file, or a folder of them, which is then
    tokenised with the folder `tokenizer`. Raises UserError when there is none, or ids do not fit the model.
    """
    prepared = (path / "meta.json").is_file()
    found = _prepared(path, tokenizer, vocab_size, count) if prepared else _text(path, tokenizer, vocab_size)
    cut = [ids[:length] for ids in itertools.islice((ids for ids in found if ids), count)]
    if not cut:
        raise UserError(f"{path}: no document in it; give a domain's folder of prepare-data, or text")
    return cut


def _prepared(path: Path, tokenizer: Path, vocab_size: int, count: int) -> Iterator[list[int]]:
    meta = load_meta(path.parent, path.name)
    has_own = tokenizer.is_dir() and any(tokenizer.glob("tokenizer*"))
    if has_own and tokenizer_hash(tokenizer) != meta["tokenizer_sha256"]:
        raise UserError(f"{path}: was prepared with another tokenizer than the model's {tokenizer}; prepare it again")
    indexed = open_indexed(path / "train", vocab_size=vocab_size)
    step = max(1, len(indexed.lengths) // count)
    for ids in itertools.islice(indexed.documents(), 0, None, step):
        yield ids.tolist()


def _text(path: Path, tokenizer: Path, vocab_size: int) -> Iterator[list[int]]:
    encoder = load_encoder(tokenizer)
    if encoder.vocab_size > vocab_size:
        raise UserError(f"{tokenizer}: has {encoder.vocab_size} ids, the model {vocab_size}; is it this model's?")
    tasks = plan_tasks(find_sources([path]), [], 0.0)
    for task in tasks:
        for piece in task:
            for text in read_piece(piece, "text"):
                yield encoder.encode([text])[0]
