"""What was done to a mixture, from its making on: kept in its manifest, carried on by every operation."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.files import read_json
from btx_nemo.checkpoints.manifest import MANIFEST
from btx_nemo.config.load import read_resolved
from btx_nemo.errors import UserError
from btx_nemo.families.source import Source, find_checkpoint
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.extras import ASIDE, ASIDE_FOLDER, Extra
from btx_nemo.mix.recipes.base import Mixture, Recipe

RESOLVED = "resolved.yaml"
"""In a run directory, above its checkpoints."""
MOST_RUNS = 16
"""One after the other, from a mixture on."""


def history_of(
    seed: Source, config: MixConfig, recipe: Recipe, options: Any, mixture: Mixture, extras: Mapping[str, Extra]
) -> list[dict[str, Any]]:
    """One entry per recipe or operation, the oldest first; an operation's mixture brings its own."""
    before = _known(seed) if recipe.on_mixture else []
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


def made_from(folder: Path) -> Path:
    """The mixture that a training run's checkpoint began as, through any number of runs; other folders are themselves.

    It may be gone, or another one be in its place: what is taken from beside it has to be checked.
    """
    for _ in range(MOST_RUNS):
        resolved = folder.parent.parent / RESOLVED
        if not resolved.is_file():
            break
        before = _started_from(resolved.parent, read_resolved(resolved) or {})
        if before is None or not before.is_dir():
            break
        folder = find_checkpoint(before) or before
    return folder


def _started_from(run: Path, settings: Mapping[str, Any]) -> Path | None:
    """What a run began from; a relative path is from the folder that the run's own, relative `out` is from."""
    start, out = settings.get("init_from"), settings.get("out")
    if not isinstance(start, str) or Path(start).is_absolute():
        return Path(start) if isinstance(start, str) else None
    parts = Path(os.path.normpath(out)).parts if isinstance(out, str) else ()
    here = run.absolute()
    if not parts or ".." in parts or parts[0] == os.sep or here.parts[-len(parts) :] != parts:  # from where, none knows
        return None
    return here.parents[len(parts) - 1] / start


def _known(mixture: Source) -> list[dict[str, Any]]:
    """The history of a mixture; empty where what it is said to come from has other experts, and so is another."""
    folder = made_from(mixture.folder)
    if not (folder / MANIFEST).is_file():
        return []
    history = read_json(folder / MANIFEST).get("history", [])
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    names = list(mixture.config.moe.experts) if mixture.config.moe else "dense"
    known = folder == mixture.folder or (entries and entries[-1].get("result") == names)
    return entries if known else []


def unknown_averages(mixture: Source, recipe: Recipe, extras: Mapping[str, Extra]) -> list[str]:
    """A warning where an expert is removed from what may be BAR's averages, since its history is not known."""
    moe = mixture.config.moe
    if recipe.name != "remove" or ASIDE in extras or _known(mixture) or not moe or moe.router != "flexolmo":
        return []
    return [
        f"{mixture.folder}: does not say which recipe made it; if it was bar, shared tensors still hold what "
        f"was removed: give aside=DIR, the mixture's {ASIDE_FOLDER} folder"
    ]


def check_embedder(mixture: Source, embeddings: Extra) -> None:
    """Raise UserError when a mixture's history says that its embeddings are of another embedder, or another model's."""
    facts, where = embeddings.facts, embeddings.folder
    for before in (entry["embeddings"] for entry in _known(mixture) if isinstance(entry.get("embeddings"), dict)):
        for key in ("embedder", "tokens"):
            if before.get(key) != facts.get(key):
                raise UserError(
                    f"{where}: {key} is {facts.get(key)}, but the mixture's embeddings were made with "
                    f"{before.get(key)}; embed the new domain as the others were"
                )
        if _model(before)[0] != _model(facts)[0]:
            raise UserError(
                f"{where}: embedded by {_model(facts)[1]}, but the mixture's embeddings by {_model(before)[1]}, "
                "another model; embed the new domain with that one"
            )


def _model(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    model = facts.get("model")
    return (model.get("layout_sha256"), model.get("path")) if isinstance(model, dict) else (None, None)
