"""Running a mix: open, check, plan, then stream into a folder that appears whole or not at all."""

from __future__ import annotations

import logging
from pathlib import Path

from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.convert.checkpoint import facts, space_needed, stream
from btx_nemo.families.source import Source, check_tied, open_source
from btx_nemo.mix import checks
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.recipes.base import Ingredients, Mixture, get_recipe
from btx_nemo.mix.write import Destination, destination
from btx_nemo.plan.execute import MAX_THREADS
from btx_nemo.plan.expr import substitute
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.table import print_plan
from btx_nemo.plan.workers import default_workers

SEED = "seed"
log = logging.getLogger(__name__)


def run_mix(config: MixConfig, *, dry_run: bool = False) -> None:
    """Mix `config.experts` and `config.seed` into `config.out`; with `dry_run`, print the plan and read no tensor.

    Raises UserError, before anything is written where it can be known before, and leaves nothing behind.
    """
    checks.check_settings(config)
    recipe = get_recipe(config.recipe)
    refuse_existing(Path(config.out))
    seed = open_source(config.seed, SEED)
    experts = [open_source(folder, name) for name, folder in config.experts.items()]
    checks.check_sources(seed, experts)
    mixture = recipe(
        Ingredients(
            layouts={source.name: source.layout() for source in (seed, *experts)},
            seed=SEED,
            experts=tuple(config.experts),
            model=seed.config,
            include_seed=config.include_seed,
            top_k=config.top_k,
            router_init_std=config.router_init_std,
            dtype=config.dtype,
        )
    )
    mixture.plan.check()
    place = destination(config, mixture.model, seed.base)
    plan = place.plan(lower(mixture.plan, [seed, *experts]), mixture.model)
    plan.check()
    workers = config.workers or default_workers(MAX_THREADS)
    if dry_run:
        print_plan(plan, workers)
        return
    for source in (seed, *experts):
        check_tied(source)
    warnings = checks.warnings(seed, experts)
    _write(config, place, mixture, plan, seed, experts, workers)
    for line in warnings:  # after all that can fail: an error is one line
        log.warning(line)


def lower(plan: Plan, sources: list[Source]) -> Plan:
    """The plan over what the sources store instead of over their shared names."""
    jobs = plan.jobs
    for source in sources:
        jobs = tuple(Job(job.target, job.info, substitute(job.expr, source.name, source.table)) for job in jobs)
    dropped = {}
    for source in sources:
        unused = {reason for (name, _), reason in plan.dropped.items() if name == source.name}
        for tensor in source.reader.layout() if unused else ():
            dropped[source.name, tensor] = next(iter(unused))
        for tensor, reason in source.dropped.items():
            dropped[source.name, tensor] = reason
    layouts = {source.name: source.reader.layout() for source in sources}
    return Plan(jobs, layouts, dropped, {source.name: str(source.folder) for source in sources})


def _write(
    config: MixConfig,
    place: Destination,
    mixture: Mixture,
    plan: Plan,
    seed: Source,
    experts: list[Source],
    workers: int,
) -> None:
    with atomic_dir(config.out, space_needed(plan, seed.tokenizer)) as folder:
        stream(plan, [seed, *experts], place.sink(folder, plan), "mix", workers=workers, seed=config.rng_seed)
        place.settings(folder, mixture.model, config.dtype or seed.dtype, seed)
        write_manifest(
            folder,
            kind="mix",
            extra={**checks.facts(config), **facts([seed, *experts], plan)},
        )
