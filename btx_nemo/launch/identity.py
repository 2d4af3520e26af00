"""What an output is made of: a fingerprint of each input, and the settings, recorded beside the runs.

    runs/state/<stage>.made.json

By content, not by date: an expert that was copied is the same expert, and one that was trained again is another,
unless it came out with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_json
from btx_nemo.checkpoints.manifest import MANIFEST
from btx_nemo.config.schema import NO_EFFECT
from btx_nemo.errors import UserError

BLOCK, BLOCKS = 1 << 16, 1 << 10
"""Bytes of a sample, and samples of a folder: 64 MiB are read at most, of a model of any size."""
INPUTS = ("init_from",)
"""Settings that name an input: its content counts."""


def fingerprint(folder: Path) -> str | None:
    """A hash of a model's content, or None where there is no model: names and sizes of files, and samples of them.

    Of a run directory it is that of hf/ or else of the latest checkpoint. Samples are spread evenly over each file, and
    small files are read whole. A change made by hand to a few bytes of a large file may go unseen.
    """
    folder = _model(folder)
    if not folder.is_dir():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        with path.open("rb") as stream:
            for offset in _offsets(size, max(BLOCKS // len(files), 2)):
                stream.seek(offset)
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def _model(folder: Path) -> Path:
    if (folder / "hf").is_dir():
        return folder / "hf"
    latest = folder / "latest"
    return folder / "checkpoints" / latest.read_text().strip() if latest.is_file() else folder


def _offsets(size: int, blocks: int) -> list[int]:
    if size <= blocks * BLOCK:
        return list(range(0, size, BLOCK))
    return [(size - BLOCK) * i // (blocks - 1) for i in range(blocks)]


@dataclass(frozen=True)
class Made:
    """What an output was made of."""

    inputs: Mapping[str, str | None]
    """Name -> fingerprint."""
    settings: Mapping[str, str]
    """Arguments of the script that change the result."""

    @classmethod
    def now(cls, inputs: Mapping[str, Path], arguments: Sequence[str]) -> Made:
        """As things are."""
        found = {name: "fresh" if str(folder) == "null" else fingerprint(folder) for name, folder in inputs.items()}
        return cls(found, settings(arguments))

    def changed_inputs(self, now: Made) -> list[str]:
        """Inputs that came, went, or have another content."""
        names = [*now.inputs, *(name for name in self.inputs if name not in now.inputs)]
        return [n for n in names if now.inputs.get(n) is None or self.inputs.get(n) != now.inputs.get(n)]

    def changed_settings(self, now: Made) -> list[str]:
        """Settings that differ, as "key=then, now this"; the order of the experts is one, which a mixture keeps."""
        keys = sorted({*self.settings, *now.settings})
        differ = [key for key in keys if self.settings.get(key) != now.settings.get(key)]
        found = [f"{key}={self.settings.get(key, 'unset')}, now {now.settings.get(key, 'unset')}" for key in differ]
        orders = [[name for name in made.inputs if name.startswith("expert-")] for made in (self, now)]
        if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
            found.append(f"{', '.join(orders[0])}, now in the order {', '.join(orders[1])}")
        return found


def settings(arguments: Sequence[str]) -> dict[str, str]:
    """The arguments of a script that change its result: without the words, which name inputs, and `NO_EFFECT`."""
    chosen = {}
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        if equals and key.partition(".")[0] not in (*NO_EFFECT, *INPUTS):
            chosen[key] = _plain(value)
        elif argument.startswith("~"):
            chosen[argument] = ""
    return chosen


def _plain(value: str) -> str:
    """One spelling for each value: 5e-5 is 5.0e-05, and quotes are no part of a text."""
    try:
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    except ValueError:
        try:
            return json.dumps(yaml.safe_load(value), sort_keys=True)
        except (yaml.YAMLError, TypeError):
            return value


def record(runs: Path, stage: str) -> Path:
    """The file that says what a stage's output was made of."""
    return runs / "state" / f"{stage}.made.json"


def made_of(runs: Path, stage: str) -> Made | None:
    """What a stage's output was made of, where that was recorded. Raises UserError for a damaged record."""
    path = record(runs, stage)
    if not path.exists():
        return None
    values: Any = read_json(path)
    parts = [values.get(key) if isinstance(values, dict) else None for key in ("inputs", "settings")]
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path}: damaged; remove it, and {stage} is taken as it is")
    return Made(*parts)  # type: ignore[arg-type]


def begin(runs: Path, stage: str, out: Path, inputs: Mapping[str, Path], arguments: Sequence[str]) -> None:
    """Called by a script before it works on `out`: records what it makes it of.

    An `out` that was made of other inputs is put aside first. Raises UserError for one made with other settings.
    """
    now, then = Made.now(inputs, arguments), made_of(runs, stage)
    there = os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir()))
    if then is not None and there:
        changed = then.changed_settings(now)
        stale = then.changed_inputs(now)
        if changed and not stale:
            raise UserError(refusal(stage, out, changed))
        if stale:
            print(
                f"{stage}: made of another {', '.join(stale)}; put aside as {put_aside(runs, stage, out)}", flush=True
            )
    elif there:
        return  # made without a script: taken as it is
    write_file(record(runs, stage), json.dumps({"inputs": now.inputs, "settings": now.settings}, indent=2) + "\n")


def refusal(stage: str, out: Path, changed: Sequence[str]) -> str:
    """What is said of an output that was made with other settings."""
    return (
        f"{out}: was made with {'; '.join(changed)}; go back to the old settings, or make it again: "
        f"btx-nemo submit --redo {stage}"
    )


def put_aside(runs: Path, stage: str, out: Path) -> Path:
    """Moves an output into `runs`/stale, where nothing looks for it; returns where it is. Nothing is deleted."""
    place = free_place(runs, stage)
    place.parent.mkdir(exist_ok=True)
    os.rename(out, place)
    record(runs, stage).unlink(missing_ok=True)
    return place


def free_place(runs: Path, stage: str) -> Path:
    """Where `put_aside` would move an output."""
    number = 1
    while os.path.lexists(runs / "stale" / f"{stage}.{number}"):
        number += 1
    return runs / "stale" / f"{stage}.{number}"
