"""A tokenizer folder on disk as an encoder; nothing is downloaded and no code of the folder is run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.atomic import atomic_dir
from btx_nemo.checkpoints.files import read_json, read_regular
from btx_nemo.checkpoints.tokenizer_files import MAX_BYTES, check_tokenizer, copy_tokenizer, tokenizer_files
from btx_nemo.errors import EnvironmentLacks, UserError

_VOCABULARIES = {
    *("tokenizer.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json"),
}
"""Files that decide the ids."""
_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Tried in this order when the folder does not name its end-of-sequence token."""


def _files(path: Path) -> dict[str, Path]:
    """Name -> file of the tokenizer's files, given its folder or its tokenizer.json. Raises UserError without one."""
    path = Path(path)
    if path.is_file() and path.suffix == ".json":
        return {"tokenizer.json": path}  # a lone one may have any name
    check_tokenizer(path)
    files = {file.name: file for file in tokenizer_files(path)}
    if not files.keys() & _VOCABULARIES:
        raise UserError(
            f"--tokenizer {path}: no tokenizer there; give the folder that holds tokenizer.json, or that file"
        )
    return files


def tokenizer_hash(path: Path) -> str:
    """SHA-256 of what decides the ids: tokenizer.json alone where there is one, else all vocabulary files."""
    files = _files(path)
    names = ["tokenizer.json"] if "tokenizer.json" in files else sorted(files.keys() & _VOCABULARIES)
    digest = hashlib.sha256()
    for name in names:
        digest.update(read_regular(files[name], MAX_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Text to token ids, without special tokens, truncation or padding."""

    backend: Any
    """A `tokenizers.Tokenizer`, or a transformers tokenizer."""
    vocab_size: int
    """Largest id + 1."""
    eod_id: int | None
    """Id that ends a document; None when the tokenizer has no such token."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        if hasattr(self.backend, "encode_batch_fast"):
            return [item.ids for item in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        if hasattr(self.backend, "encode_batch"):
            return [item.ids for item in self.backend.encode_batch(texts, add_special_tokens=False)]
        return [self.backend.encode(text, add_special_tokens=False) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


def load_encoder(path: Path, *, eod_token: str | None = None) -> Encoder:
    """Load a tokenizer for encoding.

    Args:
        path: folder, or tokenizer.json.
        eod_token: text of the token that ends a document; default the folder's end-of-sequence token.

    Raises:
        UserError: no tokenizer there, a damaged one, or `eod_token` is not in it.
        EnvironmentLacks: the tokenizer has no tokenizer.json and transformers is not installed.
    """
    files = _files(path)
    fast = files.get("tokenizer.json")
    backend = _load_fast(fast) if fast else load_transformers(Path(path))
    vocab = backend.get_vocab()
    if not vocab:
        raise UserError(f"--tokenizer {path}: its vocabulary is empty")
    wanted = [eod_token] if eod_token else [*_declared_eos(files), *_EOD_TOKENS]
    eod = next((vocab[token] for token in wanted if token in vocab), None)
    if eod_token and eod is None:
        raise UserError(f"--eod-token {eod_token!r}: {path} has no such token; name one of its vocabulary")
    return Encoder(backend=backend, vocab_size=max(vocab.values()) + 1, eod_id=eod)


def _load_fast(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"--tokenizer {path}: damaged ({str(error)[:120]})") from error
    backend.no_truncation()  # some folders carry a maximum length, which would cut documents
    backend.no_padding()
    return backend


def load_transformers(path: Path) -> Any:
    """A tokenizer folder as transformers has it; no code of the folder is run.

    Raises:
        UserError: transformers cannot load it.
        EnvironmentLacks: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EnvironmentLacks(
            f"--tokenizer {path}: needs transformers (no tokenizer.json, or chats): pip install transformers"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any of a dozen types, according to which file is missing
        raise UserError(f"--tokenizer {path}: transformers cannot load it ({str(error)[:120]})") from error


def _declared_eos(files: dict[str, Path]) -> list[str]:
    """The end-of-sequence token that the folder's own configuration names."""
    found = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if name not in files:
            continue
        token = read_json(files[name]).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found.append(token)
    return found


def keep_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer to the folder `target`, whole or not at all; one that is there must be the same.

    Raises:
        UserError: `target` holds another tokenizer.
    """
    source, target = Path(source), Path(target)
    if not target.exists():
        try:
            with atomic_dir(target) as scratch:
                copy_tokenizer(source, scratch)
        except UserError:
            if not target.exists():  # else another domain's run was quicker, and the comparison decides
                raise
    if tokenizer_hash(target) != tokenizer_hash(source):
        raise UserError(
            f"{target}: the domains there were made with another tokenizer than {source}; "
            "use that tokenizer, or another output folder"
        )
