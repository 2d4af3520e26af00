"""The settings that a stage's command would read from its arguments and its configuration file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from btx_nemo.config.load import load
from btx_nemo.config.schema import NO_EFFECT, SAME_RESULT
from btx_nemo.errors import UserError
from btx_nemo.launch.settings import READERS
from btx_nemo.mix.config import MixConfig

LEFT_OUT = (*NO_EFFECT, *SAME_RESULT, "out", "init_from", "seed", "experts", "missing", "workers")
"""What changes no result, and what names inputs and places."""
DATA = "data.path"
"""The data are wherever BTX_DATA says; the setting counts where it was given."""


def composed(stage: str, arguments: Sequence[str], given: Mapping[str, str]) -> dict[str, str] | None:
    """Key -> value in JSON, every default filled in; the same for two files of the same content.

    None where `configured` is. `given` are the settings among the `arguments` of the stage's script.
    """
    config = configured(stage, arguments)
    if config is None:
        return None
    # A mix's seed is an input; a training's is a number.
    left_out = {*LEFT_OUT} - (set() if isinstance(config, MixConfig) else {"seed"})
    leaves = {key: value for key, value in _leaves(config).items() if key not in left_out}
    return {**leaves, DATA: given.get(DATA, "unset")} if DATA in leaves else leaves


def configured(stage: str, arguments: Sequence[str]) -> Any:
    """The configuration that a stage's command would read; None where it cannot be read, and with BTX_CLI."""
    flags = dict(word.removeprefix("--").split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
    if "config-name" not in flags or os.environ.get("BTX_CLI"):
        return None
    command = "mix" if stage == "mix" or stage.startswith("pair-") else "train"
    own = ["out=out"]
    if stage.startswith("expert-"):
        own.append(f"domain='{stage.removeprefix('expert-').partition('.')[0]}'")
    overrides = [word for word in arguments if word.startswith("~") or ("=" in word and word[:2] != "--")]
    try:
        values = load(command, flags["config-name"], [*own, *overrides], flags.get("config-path"))
        return READERS[command](values, stage)
    except UserError:
        return None  # the command says so itself


def _leaves(config: Any, prefix: str = "") -> dict[str, str]:
    """The fields of nested dataclasses; mappings, whose keys are the user's, are values."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.default is not None:
            if field.name not in LEFT_OUT:
                found |= _leaves(value, f"{prefix}{field.name}.")
        else:
            plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
            found[f"{prefix}{field.name}"] = json.dumps(plain, sort_keys=True, default=str)
    return found


def override(key: str, arguments: Sequence[str]) -> str | None:
    """The last value that the arguments give to a key, as Hydra reads it; None where there is none."""
    words = [word for word in arguments if word.lstrip("+").startswith(f"{key}=")]
    if not words:
        return None
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(words[-1]).value()
    except (HydraException, ValueError, RecursionError):
        return None
    if value is None:
        return "null"
    return value if isinstance(value, str) and value and "${" not in value else None
