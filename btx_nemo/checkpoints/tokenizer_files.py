"""The small files beside the weights: tokenizer, chat template, generation settings."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.files import open_regular, read_json, read_regular
from btx_nemo.errors import UserError

PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "tekken.json",
    "chat_template.*",
    "generation_config.json",
)
MAX_BYTES = 256 << 20


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a folder that belong to its tokenizer, in order of name."""
    if not folder.is_dir():
        return []
    names = sorted(name for name in os.listdir(folder) if any(fnmatch.fnmatch(name, p) for p in PATTERNS))
    return [folder / name for name in names]


def check_tokenizer(folder: Path) -> int:
    """Bytes of the files that a tokenizer's copy takes (config.json too). Raises UserError on one that is no file."""
    total = 0
    config = folder / "config.json"
    for path in [*tokenizer_files(folder), *([config] if os.path.lexists(config) else [])]:
        fd = open_regular(path)
        total += os.fstat(fd).st_size
        os.close(fd)
    return total


def copy_tokenizer(source: Path, out: Path) -> list[str]:
    """Copy the tokenizer's files, from their folder or a lone tokenizer.json of any name; returns their names.

    Raises UserError on a file that is not a regular one.
    """
    out.mkdir(parents=True, exist_ok=True)
    lone = {"tokenizer.json": source} if source.is_file() else {}
    files = lone or {path.name: path for path in tokenizer_files(source)}
    for name, path in files.items():
        (out / name).write_bytes(read_regular(path, MAX_BYTES))
    return list(files)


def save_tokenizer(source: Path, out: Path) -> None:
    """Fill a checkpoint's tokenizer folder: the tokenizer's files, and the config.json beside them (for token ids)."""
    copy_tokenizer(source, out)
    if (source / "config.json").exists():
        (out / "config.json").write_bytes(read_regular(source / "config.json", MAX_BYTES))


def vocabulary(folder: Path) -> dict[str, int] | None:
    """token -> id from tokenizer.json, added tokens included; None without such a file.

    Raises UserError when the file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    table = read_json(path)
    try:
        vocab = table["model"]["vocab"]
        if isinstance(vocab, list):  # unigram: [token, score] in order of id
            ids = {entry[0]: number for number, entry in enumerate(vocab)}
        else:
            ids = dict(vocab)
        for token in table.get("added_tokens") or ():
            ids[token["content"]] = token["id"]
        if not all(type(number) is int and isinstance(token, str) for token, number in ids.items()):
            raise ValueError("an id is not a whole number")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise UserError(f"{path}: no vocabulary inside; copy the tokenizer again") from None
    return ids


def vocabulary_difference(mine: dict[str, int] | None, theirs: dict[str, int] | None) -> str | None:
    """`token 'x' is id 3 but id 4`: the first token that two vocabularies number differently; None without one.

    A vocabulary that is not known (None) differs from none.
    """
    if mine is None or theirs is None or mine == theirs:
        return None
    token = next(name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name))
    shown = [f"id {table[token]}" if token in table else "missing" for table in (mine, theirs)]
    return f"token {token!r} is {shown[0]} but {shown[1]}"


SECTIONS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
"""What else of tokenizer.json decides how text becomes ids and back; truncation and padding do not."""


def behaviour_differences(mine: Path, theirs: Path) -> list[str]:
    """Names of the parts in which two folders' tokenizer.json differ beyond the vocabulary, those of the model first.

    Empty when either has none. Both spellings of merges are equal; what a model has null, false or empty is not there.
    """
    paths = [folder / "tokenizer.json" for folder in (mine, theirs)]
    if not all(path.exists() for path in paths):
        return []
    tables = [read_json(path) for path in paths]
    models = [_stated(table.get("model")) for table in tables]
    for model in models:
        model.pop("vocab", None)
        merges = model.get("merges")
        if isinstance(merges, list):
            model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    keys = sorted({*models[0], *models[1]})
    found = [f"model.{key}" for key in keys if models[0].get(key) != models[1].get(key)]
    return found + [key for key in SECTIONS if (tables[0].get(key) or None) != (tables[1].get(key) or None)]


def _stated(model: Any) -> dict[str, Any]:
    """A model's entries that are not null, false or empty: writers differ in whether they name them."""
    return {key: value for key, value in model.items() if value} if isinstance(model, dict) else {}


def special_ids(folder: Path) -> dict[str, Any]:
    """bos, eos and pad token ids as the tokenizer's own files name them; empty without them."""
    path = folder / "tokenizer_config.json"
    ids = vocabulary(folder)
    if ids is None or not path.exists():
        return {}
    config = read_json(path)
    result: dict[str, Any] = {}
    for kind in ("bos", "eos", "pad"):
        token = config.get(f"{kind}_token")
        content = token.get("content") if isinstance(token, dict) else token
        result[f"{kind}_token_id"] = ids.get(content) if isinstance(content, str) else None
    return result
