"""Hugging Face architectures: names of tensors on disk, config.json, and whether they compute what a model does.

Each is an object in an open registry. `llama` and `mixtral`, say, are two architectures of one family.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_json, write_json
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.plan.expr import Expr

SHARED = "model"
"""The source that `stored` takes a model's tensors from, by their shared names (`families.names`)."""
ANY_FAMILY = "any"
"""The family of an architecture that holds several: `inexact` says which it does not, and it is tried last."""


class Architecture(Protocol):
    """What is known of one architecture. All of it is about names and settings: no tensor is read.

    One that has a `mixture` says whether its models are mixtures: a dense model is not told of those, and the reverse.
    """

    @property
    def model_type(self) -> str:
        """Its name in config.json."""

    @property
    def family(self) -> str:
        """The family that its models belong to, or `ANY_FAMILY`."""

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


@runtime_checkable
class WithCode(Protocol):
    """An architecture that transformers does not have: the code that computes it lies beside the weights."""

    def files(self) -> list[Path]:
        """Python files to copy into a folder; nothing here ever executes those of a folder."""

    def keeps_fp32(self, name: str) -> bool:
        """Whether a tensor on disk stays fp32 when the model is cast to another dtype."""


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


def stored_dtype(architecture: Architecture, name: str, dtype: str | None, own: str) -> str:
    """The dtype of a tensor on disk in a model that is cast to `dtype` (None: not cast); `own` is what it has."""
    if isinstance(architecture, WithCode) and architecture.keeps_fp32(name):
        return "float32"
    return dtype or own


def write_settings(
    architecture: Architecture, folder: Path, model: ModelConfig, dtype: str, base: Mapping[str, Any]
) -> None:
    """config.json and, where the architecture brings it, the code that computes it."""
    write_json(folder / "config.json", architecture.write(model, dtype, base))
    for path in architecture.files() if isinstance(architecture, WithCode) else ():
        write_file(folder / path.name, path.read_text())


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
