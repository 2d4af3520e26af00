"""From the settings of a stage to the words of its script and the options of sbatch."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from btx_nemo.config.flat import flat
from btx_nemo.config.load import quoted
from btx_nemo.launch.config import StageConfig

DEFAULTS = {
    "train_seed.sh": "tiny_seed",
    "train_expert.sh": "expert",
    "train_anchor.sh": "sft",
    "pair.sh": "two_expert",
    "mix.sh": "btx",
    "train_router.sh": "router",
    "train_mix.sh": "mix",
}
"""The configuration that each script takes when it is given none."""


def merged(shared: StageConfig, own: StageConfig) -> StageConfig:
    """`own`, with what it leaves open from `shared`; settings one by one."""
    fields = [field.name for field in dataclasses.fields(StageConfig)]
    values = {name: getattr(own, name) for name in fields}
    for name in fields:
        if values[name] is None:
            values[name] = getattr(shared, name)
    values["set"] = {**flat(shared.set), **flat(own.set)}
    values["sbatch"] = [*shared.sbatch, *own.sbatch]
    return StageConfig(**values)


def options(stage: StageConfig) -> tuple[str, ...]:
    """What a stage asks of sbatch."""
    gres = None if stage.gpus is None else f"gpu:{stage.gpus}" if stage.gpus else "none"
    named = {"nodes": stage.nodes, "gres": gres, "time": stage.time}
    return (*(f"--{name}={value}" for name, value in named.items() if value is not None), *stage.sbatch)


def arguments(stage: StageConfig, script: str) -> tuple[str, ...]:
    """What a stage tells its script, without the words before."""
    config = stage.config or DEFAULTS.get(script)
    flags = {"config-name": config, "config-path": stage.config_path and os.path.abspath(stage.config_path)}
    return (
        *(f"--{name}={value}" for name, value in flags.items() if value),
        *(f"{key}={spell(value)}" for key, value in flat(stage.set).items()),
    )


def spell(value: Any) -> str:
    """A value as Hydra's grammar reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(spell, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{spell(item)}' for key, item in value.items())}}}"
    text = str(value)
    simple = re.fullmatch(r"[A-Za-z/.][A-Za-z0-9_/.-]*", text) and text.lower() not in ("null", "true", "false")
    if not isinstance(value, str) or (simple and text.lower() not in ("nan", "inf")):
        return text
    return quoted(text)
