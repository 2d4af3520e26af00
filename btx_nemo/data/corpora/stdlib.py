"""The standard library's source files, in an order and a selection that depend on the Python version alone."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIP_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib-dynload",
    "encodings",  # generated tables
    "pydoc_data",  # prose of its own
    "lib2to3",  # gone in later versions, and half a copy of other files
    "ensurepip",
    "__phello__",
}
_SKIP_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
"""Differ between machines."""
_MAX_BYTES = 150_000


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file, parsed."""

    name: str
    """Path below the library's root."""
    source: str
    tree: ast.Module


def stdlib_root() -> Path:
    """Folder of the standard library of the running interpreter."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_modules() -> Iterator[Module]:
    """Hand-written modules in a shuffled but fixed order, without tests, tables and machine-made files."""
    root = stdlib_root()
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py") if _wanted(path, root)}
    for name in sorted(files, key=stable_hash):
        try:
            source = files[name].read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        if not _is_table(source):
            yield Module(name=name, source=source, tree=tree)


def stable_hash(text: str) -> str:
    """A hash that is the same in every process, unlike `hash`."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _wanted(path: Path, root: Path) -> bool:
    relative = path.relative_to(root)
    folders = set(relative.parts[:-1])
    if folders & _SKIP_FOLDERS or any(part.startswith("config-") for part in relative.parts):
        return False
    return not path.name.startswith(_SKIP_FILES) and path.is_file() and 500 <= path.stat().st_size <= _MAX_BYTES


def _is_table(source: str) -> bool:
    letters = sum(character.isalpha() for character in source)
    return letters < 0.4 * len(source)


def docstring_nodes(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstring literals of a module, its classes and functions, in source order."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.value
