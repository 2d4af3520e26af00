"""Domain `code`: the standard library's sources, docstrings taken out (they are the prose domain's)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from btx_nemo.data.corpora.stdlib import Module, docstring_nodes, stdlib_modules

_MAX_CHARS = 30_000
"""Per file, so that no single module dominates."""


def code_documents() -> Iterator[tuple[str, str]]:
    """(file name, source) pairs in a fixed shuffled order."""
    for module in stdlib_modules():
        source = without_docstrings(module)
        if len(source) > _MAX_CHARS:
            source = source[: source.rfind("\n", 0, _MAX_CHARS) + 1]
        if len(source) >= 500:
            yield module.name, source


def without_docstrings(module: Module) -> str:
    """The source with each docstring removed, or replaced by `pass` where it is the whole body. Still parses."""
    # not splitlines: that also cuts at form feeds, which ast does not count as lines
    lines = [line + "\n" for line in module.source.split("\n")]
    alone = _whole_bodies(module.tree)
    for node in docstring_nodes(module.tree):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before = lines[first][: _char(lines[first], node.col_offset)]
        after = lines[last][_char(lines[last], node.end_col_offset or 0) :]
        if before.strip() or after.strip():  # shares its line with other code: leave it
            continue
        lines[first : last + 1] = [before + "pass\n" if id(node) in alone else ""] + [""] * (last - first)
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines)).strip("\n") + "\n"


def _whole_bodies(tree: ast.Module) -> set[int]:
    """Ids of the nodes that are the only statement of a class or function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and len(node.body) == 1:
            only = node.body[0]
            if isinstance(only, ast.Expr):
                found.add(id(only.value))
    return found


def _char(line: str, byte_offset: int) -> int:
    """ast counts columns in UTF-8 bytes."""
    return len(line.encode("utf-8")[:byte_offset].decode("utf-8"))
