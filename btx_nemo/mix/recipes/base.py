"""The registry of recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.layout import Layout
from btx_nemo.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What a recipe sees: layouts under Hugging Face names, and settings. No tensor."""

    layouts: Mapping[str, Layout]
    """Source name -> layout, the seed and every specialist."""
    seed: str
    """Name of the seed among them."""
    experts: tuple[str, ...]
    """Names of the specialists, in order."""
    model: ModelConfig
    """The dense architecture that all sources share."""
    include_seed: bool
    top_k: int
    router_init_std: float
    dtype: str | None


@dataclass(frozen=True)
class Mixture:
    """What a recipe makes: the plan, and the model that its targets form."""

    plan: Plan
    model: ModelConfig


Recipe = Callable[[Ingredients], Mixture]
RECIPES: dict[str, Recipe] = {}
"""Name -> recipe."""


def register(name: str) -> Callable[[Recipe], Recipe]:
    """Decorator that adds a recipe under a name. Raises ValueError when it is taken."""

    def add(recipe: Recipe) -> Recipe:
        if name in RECIPES:
            raise ValueError(f"recipe {name!r} is registered already")
        RECIPES[name] = recipe
        return recipe

    return add


def get_recipe(name: str) -> Recipe:
    """A recipe by name; UserError with the known names otherwise."""
    import btx_nemo.mix.recipes.btx  # noqa: F401

    if name not in RECIPES:
        raise UserError(f"recipe={name}: unknown; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]
