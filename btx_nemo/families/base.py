"""The registry of model families, and finding the family of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from btx_nemo.checkpoints.files import read_json
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.expr import Expr
from btx_nemo.plan.layout import Layout


class Family(Protocol):
    """What a family knows. All of it is about names, shapes and settings: no tensor is read."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that it reads."""

    def read(self, config: Mapping[str, Any], where: str) -> ModelConfig:
        """config.json -> ModelConfig; UserError naming the setting that it cannot hold."""

    def hf_config(self, config: ModelConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
        """ModelConfig -> config.json; token ids and the like come from `base`, a config.json of the same model."""

    def hf_layout(self, config: ModelConfig, dtype: str) -> Layout:
        """Names and shapes of the Hugging Face tensors, in the order in which they are written."""

    def to_megatron(self, config: ModelConfig) -> dict[str, Expr]:
        """Megatron key -> expression over source "hf"."""

    def to_hf(self, config: ModelConfig) -> dict[str, Expr]:
        """Hugging Face name -> expression over source "ckpt"."""


FAMILIES: dict[str, Family] = {}
"""Name -> family; extend it with `register`."""


def register(family: Family) -> None:
    """Add a family. Raises ValueError when its name is taken."""
    if family.name in FAMILIES:
        raise ValueError(f"family {family.name!r} is registered already")
    FAMILIES[family.name] = family


def get_family(name: str) -> Family:
    """A family by name; UserError with the known names otherwise."""
    _load_built_in()
    if name not in FAMILIES:
        raise UserError(f"unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that reads a config.json, by its `model_type`."""
    _load_built_in()
    model_type = config.get("model_type")
    known = {kind: family for family in FAMILIES.values() for kind in family.model_types}
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"{where}: model_type {model_type!r} is not supported; known: {', '.join(sorted(known))}")
    return known[model_type]


def read_config(folder: str | Path) -> ModelConfig:
    """ModelConfig of a Hugging Face folder, dense or mixture. Raises UserError."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder; give a Hugging Face folder with config.json and safetensors")
    config = read_json(path)
    return family_of(config, str(path)).read(config, str(path))


def hf_config(config: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json for a model; `base` is a config.json of the same model to take token ids from."""
    return get_family(config.family).hf_config(config, dtype, base or {})


def to_megatron(config: ModelConfig) -> dict[str, Expr]:
    """Megatron key -> expression over source "hf"."""
    return get_family(config.family).to_megatron(config)


def to_hf(config: ModelConfig) -> dict[str, Expr]:
    """Hugging Face name -> expression over source "ckpt"."""
    return get_family(config.family).to_hf(config)


def _load_built_in() -> None:
    import btx_nemo.families.llama  # noqa: F401
