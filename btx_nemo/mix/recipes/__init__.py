"""Recipes: pure functions from the layouts of the sources to a plan. The registry is open: see `register`."""

from __future__ import annotations

from btx_nemo.mix.recipes.base import RECIPES, Recipe, get_recipe, register

__all__ = ["RECIPES", "Recipe", "get_recipe", "register"]
