"""Reading the settings of jobs before they are submitted, so that a mistake costs seconds and not a queue."""

from __future__ import annotations

import os
from collections.abc import Iterable

from btx_nemo.config.build import build
from btx_nemo.config.load import load
from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.launch.graph import Job
from btx_nemo.mix.config import MixConfig

KINDS: dict[str, tuple[str, type]] = {
    "train_seed.sh": ("train", TrainConfig),
    "train_expert.sh": ("train", TrainConfig),
    "mix.sh": ("mix", MixConfig),
    "train_router.sh": ("train", TrainConfig),
    "train_mix.sh": ("train", TrainConfig),
}
"""What each script's settings are of."""


def check_settings(jobs: Iterable[Job]) -> None:
    """Raise UserError, naming the stage, for a setting that the stage's command would refuse.

    What depends on models and data is not looked at. With BTX_CLI nothing is: that command's settings are its own.
    """
    seen = set()
    for job in jobs:
        settings = tuple(argument for argument in job.args if "=" in argument)
        if job.script not in KINDS or os.environ.get("BTX_CLI") or (job.script, settings) in seen:
            continue
        seen.add((job.script, settings))
        folder, cls = KINDS[job.script]
        flags = dict(s.removeprefix("--").split("=", 1) for s in settings if s.startswith("--"))
        overrides = [setting for setting in settings if not setting.startswith("--")]
        own = ["out=out"]
        name = flags["config-name"]
        if job.script == "train_expert.sh":
            own.append("domain=d")
        try:
            values = load(folder, name, [*own, *overrides], flags.get("config-path"))
            build(cls, values, where=f"{folder}/{name}.yaml")
        except UserError as error:
            raise UserError(f"{job.name}: {error}") from error
