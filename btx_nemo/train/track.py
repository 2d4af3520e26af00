"""TensorBoard and Weights & Biases: the numbers of metrics.jsonl, elsewhere. They never stop a run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import EnvironmentLacks, UserError


def check_log(config: TrainConfig) -> None:
    """Raises UserError for a setting that means nothing, EnvironmentLacks for a tracker that is not installed."""
    peak = config.log.peak_flops
    if peak is not None and not 0 < peak < math.inf:
        raise UserError(f"log.peak_flops={peak}: must be a positive number of FLOP/s")
    for wanted, key, package in (
        (config.log.tensorboard, "log.tensorboard", "tensorboard"),
        (config.log.wandb, "log.wandb", "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise EnvironmentLacks(f"{key}: {package} is not installed; pip install 'btx-nemo[track]' or {package}")


class Tracker(Protocol):
    """Where scalars go."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Those of one record."""

    def close(self) -> None:
        """All is written."""


class _TensorBoard:
    def __init__(self, config: TrainConfig, out: Path, resumed_at: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else 0)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _WeightsAndBiases:
    def __init__(self, config: TrainConfig, out: Path, resumed_at: int):
        import wandb

        name = out / "wandb_id"  # the same run after a restart
        if not name.exists():
            write_file(name, uuid.uuid4().hex[:8])
        settings = {"id": name.read_text(), "resume": "allow", "dir": str(out), "config": dataclasses.asdict(config)}
        self.run = wandb.init(**{**settings, **config.log.wandb})

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log(scalars, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackers:
    """Those that a run asked for. One that fails is dropped, with a warning."""

    def __init__(self, config: TrainConfig, out: Path, *, resumed_at: int, warn: Callable[[str], None]):
        self.warn = warn
        self.trackers: dict[str, Tracker] = {}
        for wanted, name, make in (
            (config.log.tensorboard, "TensorBoard", _TensorBoard),
            (config.log.wandb, "Weights & Biases", _WeightsAndBiases),
        ):
            if wanted:
                with self._dropped_on_error(name):
                    self.trackers[name] = make(config, out, resumed_at)

    @contextlib.contextmanager
    def _dropped_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.trackers.pop(name, None)
            self.warn(f"warning: {name} failed and is left out from here ({type(error).__name__}: {str(error)[:200]})")

    def write(self, record: Mapping[str, Any]) -> None:
        """The numbers of a record of metrics.jsonl."""
        if not self.trackers:
            return
        values = dict(scalars({key: value for key, value in record.items() if key != "step"}))
        for name, tracker in list(self.trackers.items()):
            with self._dropped_on_error(name):
                tracker.write(record["step"], values)

    def close(self) -> None:
        """What is buffered goes out."""
        for name, tracker in list(self.trackers.items()):
            with self._dropped_on_error(name):
                tracker.close()


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(path, number) of what a record holds: {"valid": {"math": 1.5}} is valid/math; lists of numbers are by layer.

    Tables, as the load of each expert in each layer is, stay in metrics.jsonl.
    """
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from scalars(value, f"{name}/")
        elif isinstance(value, (int, float)):
            yield name, float(value)
        elif isinstance(value, list) and all(isinstance(entry, (int, float)) for entry in value):
            yield from ((f"{name}/layer_{layer}", float(entry)) for layer, entry in enumerate(value))
