"""Reading the settings of jobs before they are submitted, so that a mistake costs seconds and not a queue."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from btx_nemo.config.load import load
from btx_nemo.config.schema import DENSE_STAGES
from btx_nemo.config.training import read_train_config
from btx_nemo.errors import UserError
from btx_nemo.launch.graph import TRAININGS, Job
from btx_nemo.mix.config import read_config

READERS: dict[str, Callable[[dict[str, Any], str], Any]] = {"train": read_train_config, "mix": read_config}
FOLDERS = {
    "train_seed.sh": "train",
    "train_anchor.sh": "train",
    "pair.sh": "mix",
    "train_expert.sh": "train",
    "mix.sh": "mix",
    "train_router.sh": "train",
    "train_mix.sh": "train",
}
"""The folder of conf/ that each script's settings are in."""
RESERVED = {
    "train_seed.sh": ("domain", "out", "export"),
    "train_anchor.sh": ("out",),
    "pair.sh": ("seed", "experts", "out", "missing"),
    "train_expert.sh": ("domain", "out"),
    "mix.sh": ("seed", "experts", "out", "missing"),
    "train_router.sh": ("init_from", "out"),
    "train_mix.sh": ("init_from", "out"),
    "export.sh": ("in", "out"),
}
"""Keys that each script sets itself, and refuses."""
MIXTURES = {"mix.sh": "top_k", "train_router.sh": "moe.top_k", "train_mix.sh": "moe.top_k"}
"""The key of the experts per token, of what makes or trains the mixture."""


def check_settings(jobs: Iterable[Job], mix: Job | None, *, paired: bool) -> None:
    """Raise UserError, naming the stage, for a setting that the stage's command would refuse.

    `mix` makes the mixture that the jobs train, where that is known; `paired`: whether the experts train two-expert
    models. What depends on models and data is not looked at. With BTX_CLI only what the scripts set themselves is: that
    command's settings are its own.
    """
    seen = set()
    experts = _experts(mix)
    for job in jobs:
        settings = tuple(argument for argument in job.args if "=" in argument)
        for setting in settings:
            key = setting.lstrip("+~").partition("=")[0]
            if key.partition(".")[0] in RESERVED.get(job.script, ()):
                raise UserError(f"{job.name}: set.{key}: {job.script} sets it itself; leave it out, or choose runs")
        if job.script not in FOLDERS or os.environ.get("BTX_CLI") or (job.script, settings) in seen:
            continue
        seen.add((job.script, settings))
        try:
            _check_fits(job, _read(job), paired, experts)
        except UserError as error:
            raise UserError(f"{job.name}: {error}") from error


def _read(job: Job) -> Any:
    """The configuration that the job's command would read."""
    settings = [argument for argument in job.args if "=" in argument]
    flags = dict(s.removeprefix("--").split("=", 1) for s in settings if s.startswith("--"))
    overrides = [setting for setting in settings if not setting.startswith("--")]
    own = ["out=out", *(["domain=d"] if job.script == "train_expert.sh" else [])]
    folder, name = FOLDERS[job.script], flags["config-name"]
    values = load(folder, name, [*own, *overrides], flags.get("config-path"))
    return READERS[folder](values, f"{folder}/{name}.yaml")


def _experts(mix: Job | None) -> int | None:
    """Experts of the mixture if none is missing; None where that is not known here."""
    if mix is None or os.environ.get("BTX_CLI"):
        return None
    try:
        config = _read(mix)
    except UserError:
        return None  # it is said of the mix itself
    domains = sum(name.startswith("expert-") for name in mix.inputs)
    if config.recipe in ("bar", "flexolmo"):
        return 1 + domains
    if config.recipe == "btx":
        from btx_nemo.mix.recipes.btx import Options

        options = Options(**config.options)
        return (domains + options.include_seed) * (options.chunks if options.variant == "split" else 1)
    return None


def _check_fits(job: Job, config: Any, paired: bool, experts: int | None) -> None:
    """Raise UserError for a recipe or a training that is not for what the pipeline makes before it."""
    if experts is not None and job.script in MIXTURES:
        key = MIXTURES[job.script]
        top_k = config.top_k if key == "top_k" else config.moe.top_k
        if top_k is not None and top_k > experts:
            remedy = f"give {job.name}.set.{key}={experts}, or more domains"
            raise UserError(f"{key}={top_k}: the mixture has {experts} experts; {remedy}")
    if FOLDERS[job.script] == "mix":
        from btx_nemo.mix.recipes import get_recipe

        recipe = get_recipe(config.recipe)
        if job.script == "pair.sh" and (recipe.takes != "one" or recipe.on_mixture):
            raise UserError(
                f"recipe {recipe.name} makes no model of an anchor and one expert; give pair.config=two_expert"
            )
        if job.script == "mix.sh" and recipe.pairs == "always" and not paired:
            raise UserError(f"recipe {recipe.name} merges two-expert models; give pair.config=two_expert")
        if job.script == "mix.sh" and recipe.pairs == "never" and paired:
            raise UserError(
                f"recipe {recipe.name} takes dense models, no pairs; give mix.config=bar or flexolmo, or pair=null"
            )
    else:
        _check_stage(job, config.stage, paired)


def _check_stage(job: Job, stage: str, paired: bool) -> None:
    """Raise UserError for a stage of training that is not for the model that the job's script trains."""
    if job.script in TRAININGS.values():
        if stage == "bar_expert":
            raise UserError("stage bar_expert trains a two-expert model, this is the mixture; take router, mix or sft")
    elif job.script == "train_expert.sh" and paired:
        if stage != "bar_expert":
            raise UserError(f"stage {stage}: pair makes a two-expert model; take a configuration of stage bar_expert")
    elif stage not in DENSE_STAGES and not any(argument.lstrip("+").startswith("init_from=") for argument in job.args):
        remedy = "give pair.config=two_expert" if stage == "bar_expert" else f"take one of {', '.join(DENSE_STAGES)}"
        raise UserError(f"stage {stage} trains a mixture, this is a dense model; {remedy}")
