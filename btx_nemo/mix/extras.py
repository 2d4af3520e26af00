"""Folders beside the models that a mix reads: domain embeddings, and shared tensors that were kept aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.files import read_json
from btx_nemo.checkpoints.manifest import read_manifest
from btx_nemo.checkpoints.safetensors import SafetensorsReader
from btx_nemo.errors import UserError

EMBEDDINGS = "@embeddings"
ASIDE = "@aside"
"""Names of sources; no domain can be called so."""
EMBEDDINGS_JSON = "embeddings.json"
EMBEDDINGS_TENSOR = "domain_embeddings"
ASIDE_JSON = "shared_per_expert.json"
ASIDE_FOLDER = "shared_per_expert"


@dataclass(frozen=True)
class Extra:
    """One such folder."""

    folder: Path
    reader: SafetensorsReader
    facts: Mapping[str, Any]
    """What its JSON file says."""


def open_embeddings(folder: str) -> Extra:
    """What `btx-nemo embed` wrote: one row per domain. Raises UserError."""
    return _open(Path(folder), EMBEDDINGS_JSON, "domains", "the output of btx-nemo embed")


def open_aside(folder: str) -> Extra:
    """What a BAR mixture keeps aside. Raises UserError."""
    return _open(Path(folder), ASIDE_JSON, "experts", f"the {ASIDE_FOLDER} folder of a mixture made by recipe=bar")


def _open(folder: Path, settings: str, key: str, kind: str) -> Extra:
    if not (folder / settings).is_file():
        raise UserError(f"{folder}: no {settings}; give {kind}")
    read_manifest(folder)
    facts = read_json(folder / settings)
    names = facts.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder / settings}: {key} must be a list of names; make the folder again")
    reader = SafetensorsReader(folder)
    if key == "domains":
        info = reader.layout().get(EMBEDDINGS_TENSOR)
        if info is None or len(info.shape) != 2 or info.shape[0] != len(names):
            raise UserError(f"{folder}: {EMBEDDINGS_TENSOR!r} does not have one row for each of {', '.join(names)}")
    return Extra(folder, reader, facts)


OPENERS: Mapping[str, tuple[str, Callable[[str], Extra]]] = {
    "embeddings": (EMBEDDINGS, open_embeddings),
    "aside": (ASIDE, open_aside),
}
"""A recipe's option -> (name of the source, how its folder is opened)."""
