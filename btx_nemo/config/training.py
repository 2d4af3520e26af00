"""Reading a training run's configuration."""

from __future__ import annotations

from typing import Any

from btx_nemo.config.build import build
from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError

LENGTHS = ("steps", "tokens", "epochs")


def read_train_config(values: dict[str, Any], where: str) -> TrainConfig:
    """A run's configuration, strictly; `steps` are 0 where `train/length.py` has yet to find them out.

    Raises:
        UserError: as `build`, and unless exactly one of steps, tokens and epochs is given.
    """
    given = [name for name in LENGTHS if values.get(name) is not None]
    if not given:
        raise UserError(f"{where}: steps is required; give steps=VALUE, tokens=VALUE or epochs=VALUE")
    if len(given) > 1:
        raise UserError(f"{where}: {' and '.join(given)}: give one of steps, tokens and epochs, null for others")
    return build(TrainConfig, {**values, "steps": values["steps"] if given == ["steps"] else 0}, where=where)
