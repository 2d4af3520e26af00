"""How long a run is: steps, or what follows from tokens or epochs."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.train.contents import contents_of


def with_steps(config: TrainConfig) -> TrainConfig:
    """The configuration with the steps that follow from `tokens` or `epochs`; with `steps` as it is.

    Raises:
        UserError: for a number that is not positive, and as `contents_of`.
    """
    if config.tokens is None and config.epochs is None:
        return config
    for name in ("tokens", "epochs"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name}={value}: must be a positive number")
    if config.global_batch_size < 1 or config.data.seq_length < 2:
        raise UserError("global_batch_size and data.seq_length: must be at least 1 and 2")
    if config.tokens is not None:
        sequences = Fraction(config.tokens) / config.data.seq_length
    else:
        sequences = Fraction(str(config.epochs)) * sum(content.sequences for content in contents_of(config).values())
    return dataclasses.replace(config, steps=math.ceil(sequences / config.global_batch_size))
