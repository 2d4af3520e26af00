"""Hugging Face architectures: names of tensors on disk, config.json, and whether they compute what a model does.

Each is an object in an open registry. `llama` and `mixtral`, say, are two architectures of one family.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from btx_nemo.checkpoints.files import read_json
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.plan.expr import Expr

SHARED = "model"
"""The source that `stored` takes a model's tensors from, by their shared names (`families.names`)."""


class Architecture(Protocol):
    """What is known of one architecture. All of it is about names and settings: no tensor is read."""

    @property
    def model_type(self) -> str:
        """Its name in config.json."""

    @property
    def family(self) -> str:
        """The family that its models belong to."""

    def read(self, config: Mapping[str, Any], where: str) -> ModelConfig:
        """config.json -> ModelConfig; UserError naming the setting that cannot be held."""

    def write(self, model: ModelConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
        """ModelConfig -> config.json; token ids and the like come from `base`, a config.json of the same model."""

    def inexact(self, model: ModelConfig) -> str | None:
        """Why it would not compute what `model` does; None when it is exact."""

    def stored(self, model: ModelConfig) -> dict[str, Expr]:
        """Name on disk -> expression over the tensors of `SHARED`, in the order in which they are written."""

    def shared(self, model: ModelConfig, source: str) -> dict[str, Expr]:
        """Shared name -> expression over `source`, which is named as on disk: the inverse of `stored`."""


ARCHITECTURES: dict[str, Architecture] = {}
"""model_type -> architecture, in the order in which they are tried; extend it with `register_architecture`."""


def register_architecture(architecture: Architecture) -> None:
    """Add an architecture. Raises ValueError when its name is taken."""
    if architecture.model_type in ARCHITECTURES:
        raise ValueError(f"architecture {architecture.model_type!r} is registered already")
    ARCHITECTURES[architecture.model_type] = architecture


def architectures() -> dict[str, Architecture]:
    """All of them by model_type."""
    from btx_nemo.families.base import load_families

    load_families()
    return ARCHITECTURES


def architecture_of(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a config.json. Raises UserError when it is not known."""
    known, model_type = architectures(), config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"{where}: model_type {model_type!r} is not supported; known: {', '.join(sorted(known))}")
    return known[model_type]


def choose_architecture(
    model: ModelConfig, base: Mapping[str, Any], where: str, target: str | None = None, allow_inexact: bool = False
) -> Architecture:
    """The architecture to write a model in: `target`, else that of `base` when it fits, else the first exact one.

    Raises UserError, with the reasons, when none computes what the model does, or `target` does not and
    `allow_inexact` is not given.
    """
    known = architectures()
    if target is not None:
        if target not in known:
            raise UserError(f"target={target}: unknown; known: {', '.join(sorted(known))}")
        reason = _mismatch(known[target], model)
        if reason and not allow_inexact:
            raise UserError(f"{where}: {reason}; leave target out, or give allow_inexact=true")
        return known[target]
    first = [known[base["model_type"]]] if base.get("model_type") in known else []
    reasons = []
    for architecture in [*first, *known.values()]:
        if architecture.family == model.family:
            reason = _mismatch(architecture, model)
            if reason is None:
                return architecture
            reasons.append(reason)
    raise UserError(f"{where}: no architecture of Hugging Face is exact: {'; '.join(dict.fromkeys(reasons))}")


def _mismatch(architecture: Architecture, model: ModelConfig) -> str | None:
    if architecture.family != model.family:
        return f"{architecture.model_type} is of family {architecture.family}, the model of {model.family}"
    return architecture.inexact(model)


def read_config(folder: str | Path) -> ModelConfig:
    """ModelConfig of a Hugging Face folder, dense or mixture. Raises UserError."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder; give a Hugging Face folder with config.json and safetensors")
    config = read_json(path)
    return architecture_of(config, str(path)).read(config, str(path))


def is_renormalised_top_k(moe: MoEConfig) -> bool:
    """Whether the rule is a softmax over the k kept logits, which is one of all, renormalised: Mixtral's."""
    return moe.router == "top_k" and (
        moe.options.get("softmax", "after") == "after" or bool(moe.options.get("renormalise", True))
    )
