"""manifest.json: what made an output folder, from what, and the files it must hold. Written last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from btx_nemo import __version__
from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_json
from btx_nemo.errors import UserError

MANIFEST = "manifest.json"
VERSION = 1
EDITABLE = (".json", ".jinja", ".txt", ".md", ".yaml")
"""Kinds of files that people change afterwards (a chat template, generation settings): only their presence is held,
except in a training checkpoint."""


def write_manifest(
    folder: Path,
    *,
    kind: str,
    extra: Mapping[str, Any] | None = None,
    digests: Mapping[str, str] | None = None,
) -> None:
    """Write the manifest of a finished folder: `kind` ("mix", "import", "export", "checkpoint") and file sizes.

    `extra` holds further JSON values: recipe, sources, seed, dropped... With `digests`, SHA-256 by file name as far as
    known, every file's is in it.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            files[name] = {"size": path.stat().st_size}
            if digests is not None:
                files[name]["sha256"] = digests.get(name) or sha256_of(path)
    table = {
        "manifest_version": VERSION,
        "tool": "btx_nemo",
        "tool_version": __version__,
        "kind": kind,
        **(extra or {}),
    }
    write_file(folder / MANIFEST, json.dumps({**table, "files": files}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest and check that its files are there with their sizes.

    Raises UserError when the manifest is missing or damaged, or a file is missing, cut or changed.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{folder}: no {MANIFEST}, so it was not finished; make it again")
    table = read_json(path)
    files = table.get("files")
    if table.get("manifest_version") != VERSION or not isinstance(files, dict):
        raise UserError(f"{path}: not a manifest of version {VERSION}; was it written by another version?")
    editable = _editable(table)
    for name, facts in files.items():
        at = folder / name
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise UserError(f"{path}: names {name!r}, outside of its folder; damaged")
        if not at.is_file():
            raise UserError(f"{at}: missing, but named in {MANIFEST}; copy the folder again")
        size = at.stat().st_size
        if size != facts.get("size") and at.suffix not in editable:
            raise UserError(f"{at}: {size} bytes, but {MANIFEST} says {facts.get('size')}; copy the folder again")
    return table


def _editable(table: Mapping[str, Any]) -> tuple[str, ...]:
    return () if table.get("kind") == "checkpoint" else EDITABLE


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest, block = hashlib.sha256(), bytearray(1 << 20)
    with path.open("rb") as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def verify_checksums(folder: Path, table: Mapping[str, Any], *, part: int = 0, parts: int = 1) -> int:
    """Compare files of a folder with the checksums in its manifest, every `parts`-th from `part` on; returns how many.

    Raises UserError at the first that differs. Files that people edit, and manifests without checksums, are left out.
    """
    named = sorted(name for name, facts in table["files"].items() if "sha256" in facts)
    editable = _editable(table)
    mine = [name for name in named[part::parts] if Path(name).suffix not in editable]
    for name in mine:
        if sha256_of(folder / name) != table["files"][name]["sha256"]:
            raise UserError(
                f"{folder / name}: its bytes are not those that were written (SHA-256 in {MANIFEST}); copy it "
                "again, or use another checkpoint"
            )
    return len(mine)


def source_facts(path: Path, layout: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a source cheaply: where it is, and a hash over file sizes, tensor names, shapes and dtypes."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file():
            digest.update(f"{file.name}\0{file.stat().st_size}\n".encode())
    for name, info in sorted(layout.items()):
        digest.update(f"{name}\0{info.shape}\0{info.dtype}\n".encode())
    return {"path": str(path.resolve()), "tensors": len(layout), "layout_sha256": digest.hexdigest()}
