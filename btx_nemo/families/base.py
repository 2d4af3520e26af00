"""The registry of model families: for each, the table that says how its tensors lie in Megatron."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
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


def from_megatron(model: ModelConfig, source: str = "ckpt", stored: Layout | None = None) -> dict[str, Expr]:
    """Shared name -> expression over the Megatron keys of `source`; what it has `stored` tells a padded vocabulary."""
    return table.from_megatron(get_family(model.family).table, model, source, stored)


GROUP = "btx_nemo.families"
"""Entry points of packages that bring families or architectures of their own."""


@functools.cache
def load_families() -> None:
    """Import the families that come with the package, then those of installed entry points, which register themselves.

    An entry point names a module, or a function without arguments. Raises UserError when one fails.
    """
    for name in ("llama", "qwen", "olmo", "btx_moe"):
        importlib.import_module(f"btx_nemo.families.{name}")
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            loaded = point.load()
            if callable(loaded):
                loaded()
        except Exception as error:  # whatever a foreign package does
            raise UserError(
                f"entry point {point.name} = {point.value} of group {GROUP}: {type(error).__name__}: {error}; "
                "mend or uninstall that package"
            ) from error
