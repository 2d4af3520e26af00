"""Models whose embeddings have different rows, made to agree before a recipe sees them.

`vocab_policy` says how: `error` refuses; `pad` is for one tokenizer and embeddings of different length (padded for a
GPU, say); `union` is for tokenizers that agree but for tokens that were added after the seed: tokens with the same text
are one row of the result, whatever their ids were, and the result's tokenizer has all of them.

A row that a model lacks is taken from the first model that has it, the seed before the specialists in their order: so a
token that one specialist alone knows keeps that specialist's row in a mean, and no value is invented.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from btx_nemo.checkpoints.files import read_json, write_json
from btx_nemo.checkpoints.reader import Reader
from btx_nemo.checkpoints.tokenizer_files import vocabulary, vocabulary_difference
from btx_nemo.config.choice import check_choice
from btx_nemo.errors import UserError
from btx_nemo.families.source import Source
from btx_nemo.plan.expr import Take
from btx_nemo.plan.layout import Box, Layout, TensorInfo

POLICIES = ("error", "pad", "union")
ROWS = ("model.embed_tokens.weight", "lm_head.weight")
"""Shared names of the tensors with a row for each token."""

Row = tuple[int, int]
"""(number of the model, row of its embedding)."""


def check_policy(policy: str) -> None:
    """Raise UserError for a policy that there is not."""
    check_choice("vocab_policy", policy, POLICIES)


def unify(policy: str, seed: Source, experts: Sequence[Source]) -> tuple[list[Source], list[dict[str, Any]]]:
    """The sources (seed first) with equal vocabularies, and the tokens to add to the seed's tokenizer.

    These are entries of tokenizer.json's `added_tokens`, with their new ids. Raises UserError where `union` has to join
    vocabularies that differ in more than added tokens.
    """
    sources = [seed, *experts]
    sizes = [source.config.vocab_size for source in sources]
    if policy == "pad" and len(set(sizes)) > 1:
        rows = [[(owner, r) for r in range(size)] for owner, size in enumerate(sizes)]
        longest = max(range(len(sizes)), key=lambda n: sizes[n])
        has = [next(n for n, size in enumerate(sizes) if r < size) for r in range(sizes[longest])]
        return [
            _with_rows(sources, n, rows[n] + [(has[r], r) for r in range(sizes[n], len(has))]) for n in range(len(rows))
        ], []
    if policy == "union":
        union = _union(sources)
        if union.added or len(set(sizes)) > 1:
            return [_with_rows(sources, n, union.rows(n)) for n in range(len(sources))], union.added
    return sources, []


@dataclass(frozen=True)
class _Union:
    """Which token has which id in the result, and had in each model."""

    size: int
    ids: Mapping[str, int]
    known: Sequence[Mapping[str, int]]
    sizes: Sequence[int]
    added: list[dict[str, Any]]

    def rows(self, number: int) -> list[Row]:
        """Where each row of the result comes from, for one model."""
        token_of = {row: token for token, row in self.ids.items()}
        taken = set(self.known[number].values())
        order = [number, *range(len(self.known))]
        rows = []
        for row in range(self.size):
            token = token_of.get(row)
            if token is not None:
                owner = next(n for n in order if token in self.known[n])
                rows.append((owner, self.known[owner][token]))
            else:  # a row without a token: padding
                rows.append((number if row < self.sizes[number] and row not in taken else 0, row))
        return rows


def _union(sources: Sequence[Source]) -> _Union:
    known, tables = [], []
    for source in sources:
        path = source.tokenizer / "tokenizer.json"
        ids = vocabulary(source.tokenizer)
        if ids is None:
            raise UserError(f"{source.folder}: vocab_policy=union needs its tokenizer.json; copy it there")
        highest, token = max((at, name) for name, at in ids.items())
        if highest >= source.config.vocab_size:
            raise UserError(
                f"{path}: token {token!r} has id {highest} but the embedding has {source.config.vocab_size} rows; "
                "is it the tokenizer of this model?"
            )
        table = read_json(path)
        entries = {entry["content"]: entry for entry in table.get("added_tokens") or ()}
        known.append(ids)
        tables.append(entries)
        base = [{name: at for name, at in v.items() if name not in e} for v, e in zip(known, tables, strict=True)]
        if difference := vocabulary_difference(base[-1], base[0]):
            raise UserError(
                f"{path}: {difference} in the seed's {sources[0].tokenizer}; vocab_policy=union joins added tokens only"
            )
    ids, added = dict(known[0]), []
    for entries in tables[1:]:
        for content, entry in sorted(entries.items(), key=lambda item: item[1]["id"]):
            if content not in ids:
                ids[content] = max(ids.values()) + 1
                added.append({**entry, "id": ids[content]})
    sizes = [source.config.vocab_size for source in sources]
    return _Union(max(sizes[0], *(at + 1 for at in ids.values())), ids, known, sizes, added)


def _with_rows(sources: Sequence[Source], number: int, rows: Sequence[Row]) -> Source:
    source = sources[number]
    config = dataclasses.replace(source.config, vocab_size=len(rows))
    stored: dict[str, list[tuple[Reader, str]]] = {}
    for shared in ROWS:
        takes = [other.table.get(shared) for other in sources]
        mine = takes[number]
        if mine is None:  # tied
            continue
        missing = next((other for other, take in zip(sources, takes) if not isinstance(take, Take)), None)
        if missing is not None or not isinstance(mine, Take):
            raise UserError(f"{(missing or source).folder}: has no tensor {shared!r} whose rows could be joined")
        stored[mine.name] = [(o.reader, t.name) for o, t in zip(sources, takes) if isinstance(t, Take)]
    return dataclasses.replace(source, config=config, reader=RowReader(source.reader, stored, runs(rows)))


def runs(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    """Consecutive rows of one model as (model, first, past the last)."""
    result: list[tuple[int, int, int]] = []
    for owner, row in rows:
        if result and result[-1][0] == owner and result[-1][2] == row:
            result[-1] = (owner, result[-1][1], row + 1)
        else:
            result.append((owner, row, row + 1))
    return result


class RowReader(Reader):
    """A reader some of whose tensors have rows of other models' tensors, in a given order."""

    def __init__(
        self, inner: Reader, owners: Mapping[str, Sequence[tuple[Reader, str]]], pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        self.inner = inner
        self.owners = owners
        """Tensor -> for each model, its reader and its name of the same tensor."""
        self.pieces = pieces
        size = sum(stop - start for _, start, stop in pieces)
        self._layout = {
            name: TensorInfo((size, *info.shape[1:]), info.dtype) if name in owners else info
            for name, info in inner.layout().items()
        }

    def layout(self) -> Layout:
        """Names, shapes and dtypes, with the rows of the result."""
        return self._layout

    def where(self, name: str) -> str:
        """The file that holds the tensor of this model."""
        return self.inner.where(name)

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read one part, from each model the rows that come from it."""
        self.inner.once = self.once
        if name not in self.owners:
            return self.inner.read_into(name, box, out)
        (low, high), rest = box[0], box[1:]
        at = 0
        for owner, start, stop in self.pieces:
            first, last = max(low, at), min(high, at + stop - start)
            if first < last:
                reader, stored = self.owners[name][owner]
                rows = (start + first - at, start + last - at)
                reader.read_into(stored, (rows, *rest), out[first - low : last - low])
            at += stop - start
        return None


def add_tokens(folder: Path, added: Sequence[Mapping[str, Any]]) -> None:
    """Put tokens into a tokenizer that was copied to `folder`: every file that lists them."""
    if not added:
        return
    table = read_json(folder / "tokenizer.json")
    write_json(folder / "tokenizer.json", {**table, "added_tokens": [*(table.get("added_tokens") or ()), *added]})
    settings = folder / "tokenizer_config.json"
    if settings.exists() and "added_tokens_decoder" in (table := read_json(settings)):
        entries = {str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in added}
        write_json(settings, {**table, "added_tokens_decoder": {**table["added_tokens_decoder"], **entries}})
    old = folder / "added_tokens.json"
    if old.exists():
        write_json(old, {**read_json(old), **{entry["content"]: entry["id"] for entry in added}})
