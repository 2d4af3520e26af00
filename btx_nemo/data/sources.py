"""Input files as a fixed list of tasks, the same whatever the number of workers, and how a task is read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from btx_nemo.errors import UserError

TASK_BYTES = 4 << 20
"""Files are grouped, and JSONL is cut, to about this much text per task."""
SPLITS = ("train", "valid")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A byte range of one file."""

    path: Path
    start: int
    end: int
    jsonl: bool
    split: str | None
    """`train` or `valid`; None where each JSONL document is split by its hash."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input file."""

    path: Path
    size: int

    @property
    def jsonl(self) -> bool:
        """Whether each line is a document."""
        return self.path.suffix in (".jsonl", ".ndjson")


def find_sources(inputs: Sequence[Path], pattern: str = "*") -> list[Source]:
    """Files in the order given; folders are walked in sorted order, hidden names and links to folders left out.

    Raises:
        UserError: an input does not exist, is not a regular file or is given twice, or there is no file at all.
    """
    paths: list[Path] = []
    from_input: dict[str, Path] = {}
    for item in map(Path, inputs):
        if item.is_dir():
            found = sorted(_walk(item, pattern), key=lambda path: path.relative_to(item).as_posix())
            if not found:
                raise UserError(f"{item}: no file in this folder matches {pattern!r}")
            new = found
        elif not item.exists():
            raise UserError(f"{item}: no such file or folder")
        elif not stat.S_ISREG(item.stat().st_mode):
            raise UserError(f"{item}: not a regular file")
        else:
            new = [item]
        for path in new:
            if (real := os.path.realpath(path)) in from_input:
                raise UserError(f"{path}: given twice, also as {from_input[real]}; name it once")
        from_input |= {os.path.realpath(path): path for path in new}
        paths += new
    if not paths:
        raise UserError("inputs: nothing given; name text files, JSONL files or folders")
    unique = {os.path.realpath(path): path for path in reversed(paths)}  # the first spelling of a file given twice
    kept = set(unique.values())
    return [Source(path=path, size=path.stat().st_size) for path in dict.fromkeys(paths) if path in kept]


def _walk(folder: Path, pattern: str) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(root) / name
            if not name.startswith(".") and path.match(pattern) and path.is_file():
                yield path


def plan_tasks(
    sources: Sequence[Source], validation: Sequence[Source] | None, fraction: float
) -> list[tuple[Piece, ...]]:
    """Cut the inputs into tasks and say which go to validation.

    Text is split by file (files of equal content stay together), JSONL by the hash of each document, and a single text
    file near its end, at a paragraph. With `validation` given, nothing is split.
    """
    if validation is not None:
        pieces = [piece for source in sources for piece in _cut(source, "train")]
        pieces += [piece for source in validation for piece in _cut(source, "valid")]
        return _group(pieces)
    texts = [source for source in sources if not source.jsonl]
    if len(texts) == 1 and len(sources) == 1:
        return _group(_split_one(texts[0], fraction))
    held_out = _choose_files(texts, fraction)
    pieces = []
    for source in sources:
        split = None if source.jsonl else SPLITS[source.path in held_out]
        pieces += _cut(source, split)
    return _group(pieces)


def _cut(source: Source, split: str | None) -> list[Piece]:
    whole = Piece(path=source.path, start=0, end=source.size, jsonl=source.jsonl, split=split)
    if not source.jsonl:
        return [whole]
    starts = range(0, source.size, TASK_BYTES)
    return [replace(whole, start=start, end=min(start + TASK_BYTES, source.size)) for start in starts]


def _group(pieces: list[Piece]) -> list[tuple[Piece, ...]]:
    tasks: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        size = piece.end - piece.start
        if not tasks or size > room:
            tasks.append([])
            room = TASK_BYTES
        tasks[-1].append(piece)
        room -= size
    return [tuple(task) for task in tasks]


def _choose_files(sources: Sequence[Source], fraction: float) -> set[Path]:
    """Validation files: in the order of their hash, as many as fit into the fraction, at least one if there are two."""
    groups: dict[str, list[Source]] = {}
    for source in sources:
        if source.size:
            groups.setdefault(_content_hash(source), []).append(source)
    if len(groups) < 2:
        return set()
    wanted, taken, chosen = fraction * sum(source.size for source in sources), 0, set()
    sizes = {digest: sum(source.size for source in group) for digest, group in groups.items()}
    for digest in sorted(groups):
        if taken + sizes[digest] <= wanted:
            taken += sizes[digest]
            chosen.add(digest)
    if not chosen:
        chosen = {min(groups, key=lambda digest: (sizes[digest], digest))}
    return {source.path for digest in chosen for source in groups[digest]}


def _content_hash(source: Source) -> str:
    """Of the size and the first 64 KiB: cheap, the same wherever the folder lies, equal for copies of a file."""
    with source.path.open("rb") as stream:
        return hashlib.sha256(str(source.size).encode() + b":" + stream.read(1 << 16)).hexdigest()


def _split_one(source: Source, fraction: float) -> list[Piece]:
    whole = _cut(source, "train")[0]
    target = int(source.size * (1 - fraction))
    with source.path.open("rb") as stream:
        stream.seek(target)
        tail = stream.read()
    for border in (b"\n\n", b"\n"):
        at = tail.find(border)
        cut = target + at + len(border)
        if at >= 0 and cut < source.size:
            return [replace(whole, end=cut), replace(whole, start=cut, split="valid")]
    return [whole]


def is_validation(text: str, fraction: float) -> bool:
    """Whether a JSONL document belongs to validation: by its content alone, so equal documents stay together."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def read_piece(piece: Piece, text_key: str) -> Iterator[str]:
    """Documents of a piece.

    Raises:
        UserError: not UTF-8, a line that is not JSON or lacks the key; with file and line.
    """
    if piece.jsonl:
        yield from read_records(piece, lambda record: _text_of(record, text_key))
        return
    with piece.path.open("rb") as stream:
        stream.seek(piece.start)
        yield _decode(stream.read(piece.end - piece.start), piece, piece.start)


def read_records(piece: Piece, parse: Callable[[Any], T]) -> Iterator[T]:
    """What `parse` makes of each JSON line of a piece; its UserError gets file and line in front.

    Raises:
        UserError: as `read_piece`.
    """
    for record, at in _records(piece):
        try:
            yield parse(record)
        except UserError as error:
            raise UserError(f"{piece.path}:{_line_number(piece.path, at)}: {error}") from error


def _records(piece: Piece) -> Iterator[tuple[Any, int]]:
    """JSON values and the byte at which each starts. A line belongs to the piece in which it starts."""
    with piece.path.open("rb") as stream:
        stream.seek(max(0, piece.start - 1))
        if piece.start:
            stream.readline()
        while (at := stream.tell()) < piece.end:
            line = stream.readline()
            if not line.strip():
                continue
            try:
                record = json.loads(_decode(line, piece, at))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{piece.path}:{_line_number(piece.path, at)}: not JSON ({str(error)[:80]})") from error
            yield record, at


def _decode(data: bytes, piece: Piece, at: int) -> str:
    try:
        return data.decode("utf-8-sig" if at == 0 else "utf-8")
    except UnicodeDecodeError as error:
        line = _line_number(piece.path, at + error.start)
        raise UserError(f"{piece.path}:{line}: not UTF-8; convert the file (iconv), or leave it out") from error


def _text_of(record: Any, key: str) -> str:
    text = value_of(record, key, "--text-key")
    if not isinstance(text, str):
        raise UserError(f"{key!r} is {type(text).__name__}, not text")
    check_unicode(text, repr(key))
    return text


def value_of(record: Any, key: str, option: str) -> Any:
    """What a JSON record has under `key`, which `option` names. Raises UserError, without a place, if it has none."""
    if not isinstance(record, dict) or key not in record:
        keys = ", ".join(sorted(record)[:8]) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"no key {key!r} (found: {keys}); name it with {option}")
    return record[key]


def check_unicode(text: str, what: str) -> None:
    """Raises UserError, without a place, for text that is no Unicode: JSON can hold half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{what} holds a lone surrogate; repair the line") from error


def _line_number(path: Path, at: int) -> int:
    """Line of a byte offset, from 1; read only once something is wrong."""
    number = 1
    with path.open("rb") as stream:
        while at > 0 and (block := stream.read(min(at, 1 << 20))):
            number += block.count(b"\n")
            at -= len(block)
    return number
