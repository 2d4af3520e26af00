"""What was done to a mixture, from its making on: kept in its manifest, carried on by every operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.files import read_json
from btx_nemo.checkpoints.manifest import MANIFEST
from btx_nemo.families.source import Source
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.extras import Extra
from btx_nemo.mix.recipes.base import Mixture, Recipe


def history_of(
    seed: Source, config: MixConfig, recipe: Recipe, options: Any, mixture: Mixture, extras: Mapping[str, Extra]
) -> list[dict[str, Any]]:
    """One entry per recipe or operation, the oldest first; an operation's mixture brings its own."""
    before: list[dict[str, Any]] = []
    if recipe.on_mixture and (seed.folder / MANIFEST).is_file():
        known = read_json(seed.folder / MANIFEST).get("history", [])
        before = known if isinstance(known, list) else []
    moe = mixture.model.moe
    entry = {
        "recipe": recipe.name,
        "in" if recipe.on_mixture else "seed": str(Path(config.seed)),
        "experts": {name: str(Path(path)) for name, path in config.experts.items()},
        "options": dataclasses.asdict(options),
        "result": list(moe.experts) if moe else "dense",
        "retrain": mixture.retrain,
        **{name.lstrip("@"): dict(extra.facts) for name, extra in extras.items()},
    }
    return [*before, entry]
