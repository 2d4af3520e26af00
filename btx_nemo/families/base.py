"""The registry of model families: for each, the table that says how its tensors lie in Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families import table
from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.expr import Expr
from btx_nemo.plan.layout import Layout


@dataclass(frozen=True)
class Family:
    """Models whose layers are built alike, dense or mixtures."""

    name: str
    table: tuple[table.Row, ...]


FAMILIES: dict[str, Family] = {}
"""Name -> family; extend it with `register_family`."""


def register_family(family: Family) -> None:
    """Add a family. Raises ValueError when its name is taken."""
    if family.name in FAMILIES:
        raise ValueError(f"family {family.name!r} is registered already")
    FAMILIES[family.name] = family


def get_family(name: str) -> Family:
    """A family by name; UserError with the known names otherwise."""
    load_families()
    if name not in FAMILIES:
        raise UserError(f"unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def layout(model: ModelConfig, dtype: str) -> Layout:
    """Shapes of a model's tensors under their shared names, in the order in which they are written."""
    return table.layout(get_family(model.family).table, model, dtype)


def to_megatron(model: ModelConfig, source: str = "hf") -> dict[str, Expr]:
    """Megatron key -> expression over the shared names of `source`."""
    return table.to_megatron(get_family(model.family).table, model, source)


def from_megatron(model: ModelConfig, source: str = "ckpt") -> dict[str, Expr]:
    """Shared name -> expression over the Megatron keys of `source`."""
    return table.from_megatron(get_family(model.family).table, model, source)


def load_families() -> None:
    """Import the families that come with the package, which registers them."""
    import btx_nemo.families.llama  # noqa: F401
