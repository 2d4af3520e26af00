"""The registry of recipes, what a recipe is given, and what it makes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch

from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.mix.extras import Extra
from btx_nemo.plan.expr import Expr
from btx_nemo.plan.layout import Layout
from btx_nemo.plan.plan import Plan

O = TypeVar("O")  # noqa: E741
MOST_EXPERTS = 1 << 14
"""Experts of one layer, at most: many more than anyone trains, few enough to be planned one by one."""


@dataclass(frozen=True)
class NoOptions:
    """The settings of a recipe that has none of its own."""


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What a recipe sees: layouts under shared names, and settings. No tensor."""

    layouts: Mapping[str, Layout]
    """Source name -> layout: the seed, every specialist, every extra."""
    seed: str
    """Name of the seed (of the mixture, for an operation) among them."""
    experts: tuple[str, ...]
    """Names of the specialists, in order."""
    model: ModelConfig
    """The seed's architecture."""
    models: Mapping[str, ModelConfig]
    """The specialists' architectures."""
    options: Any
    """The recipe's own settings."""
    top_k: int | None
    router_init_std: float | None
    rng_seed: int
    dtype: str | None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """Folders beside the models (domain embeddings, shared tensors kept aside), by the name of their source."""
    equal: Callable[[Expr, Expr], bool] = lambda a, b: False
    """Whether two tensors have the same bits, read when asked; a dry run reads nothing and says no."""

    def settings(self, kind: type[O]) -> O:
        """`options`, which are of that kind."""
        assert isinstance(self.options, kind)
        return self.options

    def choose_top_k(self, default: int, count: int) -> int:
        """The experts per token of a mixture of `count`. Raises UserError when that is not possible or too many."""
        if count > MOST_EXPERTS:
            raise UserError(f"{count} experts in a layer are more than {MOST_EXPERTS}; choose a smaller number")
        top_k = min(default, count) if self.top_k is None else self.top_k
        if top_k < 1:
            raise UserError(f"top_k={top_k} must be at least 1")
        if top_k > count:
            raise UserError(f"top_k={top_k} exceeds the {count} experts; lower top_k or add experts")
        return top_k

    def std(self, default: float = 0.02) -> float:
        """The standard deviation of a fresh router."""
        return default if self.router_init_std is None else self.router_init_std

    def dtype_of(self, name: str) -> str:
        """The dtype of a result that is made like a tensor of the seed's."""
        return self.dtype or self.layouts[self.seed][name].dtype


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What a recipe makes: the plan, and the model that its targets form."""

    plan: Plan
    model: ModelConfig
    same: tuple[tuple[Expr, Expr, str], ...] = ()
    """Pairs of tensors that must have the same bits, and what it means when they have not."""
    aside: Mapping[str, Expr] = field(default_factory=dict)
    """Tensors that are kept beside the result, for later operations, and are no part of the model."""
    aside_facts: Mapping[str, Any] = field(default_factory=dict)
    """What must be known of them."""
    retrain: str = ""
    """What has to be trained next, for people."""
    probe: Callable[[Callable[[str], torch.Tensor]], list[str]] | None = None
    """Given a function that evaluates a target, lines to say of the result."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A pure function from layouts to a plan, and what it takes."""

    name: str
    plan: Callable[[Ingredients], Mixture]
    options: type
    takes: str
    """How many specialists: none, one, or some (one and more)."""
    pairs: str
    """Whether these are mixtures of an anchor and one domain's expert: never, always, or either (or dense)."""
    on_mixture: bool
    """Whether the seed is a mixture: the recipe is an operation on it."""
    routed: bool
    """Whether the result has fresh routing, so that top_k and router_init_std mean something."""
    trained: bool
    """Whether the specialists are meant to have been trained already, so that an equal one is a mistake."""


Planner: TypeAlias = Callable[[Ingredients], Mixture]
RECIPES: dict[str, Recipe] = {}
"""Name -> recipe."""
_MODULES = {
    "btx_nemo.mix.recipes": (
        *("btx", "sparse_upcycling", "nvidia_upcycling", "drop_upcycling", "from_scratch", "divmoe", "nexus"),
        *("two_expert", "flexolmo", "bar", "bam", "average", "task_arithmetic", "ties", "dare"),
    ),
    "btx_nemo.mix.operations": ("add", "upgrade", "remove", "extend"),
}


def register(
    name: str,
    options: type = NoOptions,
    *,
    takes: str = "some",
    pairs: str = "never",
    on_mixture: bool = False,
    routed: bool = True,
    trained: bool = True,
) -> Callable[[Planner], Planner]:
    """Decorator that adds a recipe under a name. Raises ValueError when it is taken."""

    def add(plan: Planner) -> Planner:
        if name in RECIPES:
            raise ValueError(f"recipe {name!r} is registered already")
        taken = {f.name for f in dataclasses.fields(options)} & {"in", "seed", "experts", "out", "top_k", "format"}
        if taken:
            raise ValueError(f"recipe {name!r}: every mix has {', '.join(taken)} already")
        RECIPES[name] = Recipe(
            name=name,
            plan=plan,
            options=options,
            takes=takes,
            pairs=pairs,
            on_mixture=on_mixture,
            routed=routed,
            trained=trained,
        )
        return plan

    return add


def get_recipe(name: str) -> Recipe:
    """A recipe by name; UserError with the known names otherwise."""
    for package, modules in _MODULES.items():
        for module in modules:
            importlib.import_module(f"{package}.{module}")
    if name not in RECIPES:
        raise UserError(f"recipe={name}: unknown; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]
