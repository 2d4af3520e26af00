"""Domain `prose`: the language reference in `pydoc_data.topics`, the library's docstrings, and its licence text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from btx_nemo.data.corpora.stdlib import Module, docstring_nodes, stable_hash, stdlib_modules, stdlib_root

_MIN_CHARS = 400
_WORD = re.compile(r"[A-Za-z]{2,}")
_RULE = re.compile(r"^[\s=\-*~^#.+|_]{4,}$")


def prose_documents() -> Iterator[tuple[str, str]]:
    """(name, text) pairs in a fixed shuffled order; a document is a topic, a licence, or one module's docstrings."""
    documents = dict(_topics())
    documents.update(_licence())
    for module in stdlib_modules():
        documents[f"docstrings/{module.name}"] = clean("\n\n".join(_docstrings(module)))
    seen: set[str] = set()
    for name in sorted(documents, key=stable_hash):
        # the same paragraph often stands in several places: kept once, it cannot be in training and validation
        fresh = [block for block in dict.fromkeys(documents[name].split("\n\n")) if block.strip() not in seen]
        seen.update(block.strip() for block in fresh)
        if sum(map(len, fresh)) >= _MIN_CHARS:
            yield name, "\n\n".join(fresh).strip() + "\n"


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship it apart
        return
    for name, text in topics.items():
        yield f"topics/{name}", clean(text)


def _licence() -> Iterator[tuple[str, str]]:
    for name in ("LICENSE.txt", "LICENSE"):
        path = stdlib_root() / name
        if path.is_file():
            yield "licence", clean(path.read_text(encoding="utf-8", errors="ignore"))
            return


def _docstrings(module: Module) -> Iterator[str]:
    nodes = sorted(docstring_nodes(module.tree), key=lambda node: node.lineno)
    for node in nodes:
        text = inspect.cleandoc(str(node.value))
        if len(_WORD.findall(text)) >= 6:
            yield text


def clean(text: str) -> str:
    """Running text only: whole paragraphs of mostly words, unindented, without sessions, tables and code."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text.replace("\t", "    ").replace("\x08", "")):
        lines = [line.strip() for line in block.splitlines() if not _RULE.match(line)]
        joined = " ".join(line for line in lines if line)
        if joined.startswith((">>>", "...", "|")) or " = " in joined or "::=" in joined:
            continue
        words = sum(map(len, _WORD.findall(joined)))
        if len(joined) >= 40 and words >= 0.68 * len(joined):
            paragraphs.append(joined.rstrip(": ") + "." if joined.endswith("::") else joined)
    return "\n\n".join(paragraphs) + "\n"
