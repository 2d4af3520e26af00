"""What an output is made of: a fingerprint of each input, and the settings, recorded beside the runs.

    runs/state/<stage>.made.json

By content, not by date: an expert that was copied is the same expert, and one that was trained again is another,
unless it came out with the same bits. One that is not there is no other: a mount may be gone, a name mistyped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_json
from btx_nemo.checkpoints.manifest import MANIFEST
from btx_nemo.config.schema import NO_EFFECT, SAME_RESULT
from btx_nemo.errors import UserError
from btx_nemo.launch.composed import composed, configured, override
from btx_nemo.launch.words import spell

BLOCK, BLOCKS = 1 << 16, 1 << 10
"""Bytes of a sample, and samples of a folder: 64 MiB are read at most, of a model of any size."""
INPUTS = ("init_from",)
"""Settings that name an input: its content counts."""
DOCUMENTS = re.compile(r"(readme|licen[sc]e|notice|use_policy|\.git|\.ds_store).*|.*\.(md|rst|pdf|png|jpe?g|svg)", re.I)
"""Files that go along with a model and change nothing in it; whatever else is there counts."""


def fingerprint(folder: Path, *, documents: bool = False) -> str | None:
    """A hash of a model's content, or None where there is no model: names and sizes of files, and samples of them.

    Of a run directory it is that of hf/ or else of the latest checkpoint. Samples are spread evenly over each file, and
    small files are read whole. A change made by hand to a few bytes of a large file may go unseen. `documents`: with
    readmes and the like, as records were before these were left out.
    """
    folder = _model(folder)
    files = [path for path in _files(folder) if documents or not DOCUMENTS.fullmatch(path.name)]
    if not files or not all(path.exists() for path in files):  # nothing is mounted here, or not what links point to
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}\0{size}\0".encode(errors="surrogateescape"))
        with path.open("rb") as stream:
            for offset in _offsets(size, max(BLOCKS // len(files), 2)):
                stream.seek(offset)
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Files of a model, and links that lead nowhere."""
    found = folder.rglob("*") if folder.is_dir() else []
    return sorted(path for path in found if path.name != MANIFEST and (path.is_file() or not path.exists()))


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
    composed: Mapping[str, str] | None = None
    """All settings that come of them and the configuration file; None where they are not known."""
    whole: Mapping[str, str | None] = field(default_factory=dict)
    """Fingerprints as older records have them."""

    @classmethod
    def now(cls, stage: str, inputs: Mapping[str, Path], arguments: Sequence[str]) -> Made:
        """As things are."""
        found, whole = (
            {n: "fresh" if str(path) == "null" else fingerprint(path, documents=old) for n, path in inputs.items()}
            for old in (False, True)
        )
        given = settings(arguments)
        return cls(found, given, composed(stage, arguments, given), whole)

    def missing(self, now: Made) -> list[str]:
        """Inputs that are not there, and are known to have been, or are named for the first time."""
        return [n for n, found in now.inputs.items() if found is None and self.inputs.get(n, "named") is not None]

    def changed_inputs(self, now: Made) -> list[str]:
        """Inputs that are named for the first time or no more, or have another content; not those that are missing."""
        kept = [name for name in now.inputs if name in self.inputs and now.inputs[name] is not None]
        differ = {name for name in kept if self.inputs[name] not in (now.inputs[name], now.whole.get(name))}
        names = [*now.inputs, *(name for name in self.inputs if name not in now.inputs)]
        return [name for name in names if name in differ or (name in self.inputs) != (name in now.inputs)]

    def changed_settings(self, now: Made) -> list[str]:
        """Settings that differ, as "key=then, now this"; the order of the experts is one, which a mixture keeps."""
        then, present = self.settings, now.settings
        keys = {*then, *present} - {*SAME_RESULT}  # which records of old have
        if self.composed is not None and now.composed is not None:
            then, present = self.composed, now.composed
            keys = {*then} & {*present}  # a version that has a new setting did the same without it
        differ = [key for key in sorted(keys) if then.get(key) != present.get(key)]
        found = [f"{key}={then.get(key, 'unset')}, now {present.get(key, 'unset')}" for key in differ]
        orders = [[name for name in made.inputs if name.startswith("expert-")] for made in (self, now)]
        if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
            found.append(f"{', '.join(orders[0])}, now in the order {', '.join(orders[1])}")
        return found


def settings(arguments: Sequence[str]) -> dict[str, str]:
    """The arguments of a script that change its result: without the words, which name inputs, and what changes none."""
    chosen = {}
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        if equals and key not in SAME_RESULT and key.partition(".")[0] not in (*NO_EFFECT, *INPUTS):
            chosen[key] = _plain(value)
        elif argument.startswith("~"):
            chosen[argument] = ""
    return chosen


def _plain(value: str) -> str:
    """One spelling for each value: 5e-5 is 5.0e-05, and quotes are no part of a text."""
    with contextlib.suppress(ValueError):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    try:
        return json.dumps(yaml.safe_load(value), sort_keys=True)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError):  # some dates, and a thousand brackets
        return value


def made_path(runs: Path, stage: str) -> Path:
    """The file that says what a stage's output was made of."""
    return runs / "state" / f"{stage}.made.json"


def made_of(runs: Path, stage: str) -> Made | None:
    """What a stage's output was made of, where that was recorded. Raises UserError for a damaged record."""
    path = made_path(runs, stage)
    if not path.exists():
        return None
    with contextlib.suppress(UserError, TypeError):
        values = read_json(path)
        parts = [values.get(key, {}) for key in ("inputs", "settings", "composed")]
        if {"inputs", "settings"} <= values.keys() and all(isinstance(part, dict) for part in parts):
            return Made(parts[0], parts[1], values.get("composed"))
    raise UserError(f"{path}: damaged; remove it, and {stage} is taken as it is")


def begin(runs: Path, stage: str, out: Path, inputs: Mapping[str, Path], arguments: Sequence[str]) -> None:
    """Called by a script before it works on `out`: records what it makes it of.

    An `out` that was made of other inputs is put aside first. Raises UserError for one made with other settings, for
    one of whose inputs one is not there now, and for a configuration that starts from what the script does not know.
    """
    if "from" in inputs:
        start = override("init_from", arguments)  # the scripts know less of quotes than Hydra
        if start is not None:
            inputs = {**inputs, "from": Path(start)}
        else:
            _check_start(stage, inputs["from"], arguments)
    now, then = Made.now(stage, inputs, arguments), made_of(runs, stage)
    there = os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir()))
    values = {"inputs": now.inputs, "settings": now.settings}
    if now.composed is not None:
        values["composed"] = now.composed
    if then is not None and there:
        check_there(runs, stage, then.missing(now), inputs)
        stale, changed = then.changed_inputs(now), then.changed_settings(now)
        if changed and not stale:
            raise UserError(refusal(stage, out, changed))
        if stale:
            aside = put_aside(runs, stage, out)
            print(f"{stage}: made of another {', '.join(stale)}; put aside as {aside}", flush=True)
        elif then.composed is not None:
            values["composed"] = {**then.composed, **(now.composed or {})}
    elif there:
        return  # made without a script: taken as it is
    write_file(made_path(runs, stage), json.dumps(values, indent=2) + "\n")


def _check_start(stage: str, start: Path, arguments: Sequence[str]) -> None:
    """Raise UserError for a configuration that starts from elsewhere than its script was told."""
    config = configured(stage, arguments)
    if config is None:
        return
    own = config.init_from
    if own is None or Path(own).absolute() != start.absolute():
        raise UserError(
            f"{stage}: its configuration starts from {own or 'nothing'}, and its script would record {start}; "
            f"give init_from={spell(own)} among the overrides (set.init_from in a pipeline)"
        )


def check_there(runs: Path, stage: str, missing: Sequence[str], inputs: Mapping[str, Path]) -> None:
    """Raise UserError where an input of something made before is missing: that does not make it another's."""
    if missing:
        name = missing[0]
        raise UserError(
            f"{stage}: the input {name} is missing: {inputs[name]} has no model; bring it back or name the right one. "
            f"(Without {made_path(runs, stage)} {stage} is taken as it is.)"
        )


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
    if (target := _target(out)) is not None:
        os.symlink(target, place)
        out.unlink()
    else:
        os.rename(out, place)
    made_path(runs, stage).unlink(missing_ok=True)
    return place


def moving(out: Path, place: Path) -> list[list[str]]:
    """The commands of a shell that move an output as `put_aside` does."""
    if (target := _target(out)) is not None:
        return [["ln", "-s", str(target), str(place)], ["rm", str(out)]]
    return [["mv", "-T", str(out), str(place)]]


def _target(out: Path) -> Path | None:
    """Where a link has to lead once moved, as a relative one led elsewhere from there; None where there is no link."""
    return out.parent.absolute() / os.readlink(out) if out.is_symlink() else None


def free_place(runs: Path, stage: str) -> Path:
    """Where `put_aside` would move an output."""
    number = 1
    while os.path.lexists(runs / "stale" / f"{stage}.{number}"):
        number += 1
    return runs / "stale" / f"{stage}.{number}"
