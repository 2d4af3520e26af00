"""Running a mix: open, check, plan, then stream into a folder that appears whole or not at all."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
from btx_nemo.checkpoints.files import write_json
from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.config.build import build
from btx_nemo.convert.checkpoint import facts, space_needed, stream
from btx_nemo.families.source import Source, check_tied, open_source
from btx_nemo.mix import checks
from btx_nemo.mix.compare import check_same, equal, lowered
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.distance import report
from btx_nemo.mix.extras import ASIDE_FOLDER, ASIDE_JSON, EMBEDDINGS, OPENERS, Extra
from btx_nemo.mix.history import check_embedder, history_of, made_from, unknown_averages
from btx_nemo.mix.recipes.base import Ingredients, Mixture, Recipe, get_recipe
from btx_nemo.mix.vocabulary import add_tokens, unify
from btx_nemo.mix.write import Destination, destination
from btx_nemo.plan.evaluate import TensorReader, evaluate
from btx_nemo.plan.execute import default_threads
from btx_nemo.plan.expr import Expr, Take, infer, takes
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.progress import byte_progress
from btx_nemo.plan.statistics import measure, with_values
from btx_nemo.plan.table import print_plan

SEED = "seed"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kitchen:
    """Everything that is open while a mix is made."""

    config: MixConfig
    recipe: Recipe
    options: Any
    seed: Source
    experts: list[Source]
    tokens: list[dict[str, Any]]
    """What the tokenizer has to be given beside the seed's."""
    extras: Mapping[str, Extra]

    @property
    def sources(self) -> list[Source]:
        """The models, the seed first."""
        return [self.seed, *self.experts]

    @property
    def readers(self) -> Mapping[str, TensorReader]:
        """Of the models and of what lies beside them, by name."""
        return {s.name: s.reader for s in self.sources} | {name: x.reader for name, x in self.extras.items()}

    @property
    def workers(self) -> int:
        """Threads to use."""
        return self.config.workers or default_threads()


def run_mix(config: MixConfig, *, dry_run: bool = False) -> None:
    """Mix `config.experts` and `config.seed` into `config.out`; with `dry_run`, print the plan and read no tensor.

    Raises UserError, before anything is written where it can be known before, and leaves nothing behind.
    """
    kitchen = _open(config)
    mixture = kitchen.recipe.plan(_ingredients(kitchen, dry_run))
    mixture.plan.check()
    place = destination(config, mixture.model, kitchen.seed.base)
    plan = place.plan(lower(mixture.plan, kitchen.sources), mixture.model)
    plan.check()
    if dry_run:
        print_plan(plan, kitchen.workers)
        return
    for source in kitchen.sources:
        check_tied(source)
    warnings = checks.warnings(kitchen.seed, kitchen.experts, union=config.vocab_policy == "union")
    warnings += unknown_averages(kitchen.seed, kitchen.recipe, kitchen.extras)
    distances, far = report(kitchen.seed, kitchen.experts if kitchen.recipe.trained else [])
    check_same(mixture.same, kitchen.sources, kitchen.readers)
    lines = _write(kitchen, place, mixture, plan)
    for line in distances:
        print(line)
    for line in [*warnings, *far, *lines]:  # after all that can fail: an error is one line
        log.warning(line)
    if mixture.retrain:
        print(f"{config.out}: next: {mixture.retrain}")


def _open(config: MixConfig) -> Kitchen:
    recipe = get_recipe(config.recipe)
    options: Any = build(recipe.options, config.options, where=f"recipe={recipe.name}")
    checks.check_settings(config, recipe)
    refuse_existing(Path(config.out))
    seed = open_source(config.seed, SEED, allow_bin=config.allow_bin)
    experts = [open_source(place, name, allow_bin=config.allow_bin) for name, place in config.experts.items()]
    (seed, *experts), tokens = unify(config.vocab_policy, seed, experts)
    checks.check_sources(seed, experts, recipe, union=config.vocab_policy == "union")
    extras = {}
    for option, (name, opener) in OPENERS.items():
        folder = getattr(options, option, None)
        if folder is None and option == "aside" and hasattr(options, "aside"):
            beside = made_from(seed.folder) / ASIDE_FOLDER
            folder = str(beside) if beside.is_dir() else None
        if folder is not None:
            extras[name] = opener(folder)
    if recipe.on_mixture and EMBEDDINGS in extras:
        check_embedder(seed, extras[EMBEDDINGS])
    return Kitchen(config, recipe, options, seed, experts, tokens, extras)


def _ingredients(kitchen: Kitchen, dry_run: bool) -> Ingredients:
    config = kitchen.config
    layouts = {source.name: source.layout() for source in kitchen.sources}
    readers = kitchen.readers

    def same(a: Expr, b: Expr) -> bool:
        return not dry_run and equal(a, b, kitchen.sources, readers)

    return Ingredients(
        layouts=layouts | {name: extra.reader.layout() for name, extra in kitchen.extras.items()},
        seed=SEED,
        experts=tuple(config.experts),
        model=kitchen.seed.config,
        models={source.name: source.config for source in kitchen.experts},
        options=kitchen.options,
        top_k=config.top_k,
        router_init_std=config.router_init_std,
        rng_seed=config.rng_seed,
        dtype=config.dtype,
        extras=kitchen.extras,
        equal=same,
    )


def lower(plan: Plan, sources: list[Source]) -> Plan:
    """The plan over what the sources store instead of over their shared names."""
    jobs = tuple(Job(job.target, job.info, lowered(job.expr, sources)) for job in plan.jobs)
    statistics = {
        name: statistic.with_parts([lowered(part, sources) for part in statistic.parts()])
        for name, statistic in plan.statistics.items()
    }
    names = {source.name for source in sources}
    dropped = {key: reason for key, reason in plan.dropped.items() if key[0] not in names}
    for source in sources:
        used = {take.name for job in jobs for take in _takes_of(job.expr, source.name)}
        reasons = {name: reason for (owner, name), reason in plan.dropped.items() if owner == source.name}
        for shared, reason in reasons.items():
            for take in _takes_of(source.table[shared], source.name):
                if take.name not in used:
                    dropped[source.name, take.name] = reason
        for tensor, reason in source.dropped.items():
            dropped[source.name, tensor] = reason
    layouts = {**plan.sources, **{source.name: source.reader.layout() for source in sources}}
    folders = {source.name: str(source.folder) for source in sources}
    return Plan(jobs, layouts, dropped, folders, statistics)


def _takes_of(expr: Expr, source: str) -> list[Take]:
    return [take for take in takes(expr) if take.source == source]


def _write(kitchen: Kitchen, place: Destination, mixture: Mixture, plan: Plan) -> list[str]:
    config, seed = kitchen.config, kitchen.seed
    with atomic_dir(config.out, space_needed(plan, seed.tokenizer) + _aside_bytes(kitchen, mixture)) as folder:
        plan = _measured(kitchen, plan)
        sink, beside = place.sink(folder, plan), {name: extra.reader for name, extra in kitchen.extras.items()}
        stream(
            plan, kitchen.sources, sink, "mix", workers=kitchen.workers, seed=config.rng_seed, beside=beside
        )  # fmt: skip
        place.settings(folder, mixture.model, config.dtype or seed.dtype, seed)
        add_tokens(place.tokenizer(folder), kitchen.tokens)
        if mixture.aside:
            _write_aside(kitchen, mixture, folder / ASIDE_FOLDER)
        history = history_of(seed, config, kitchen.recipe, kitchen.options, mixture, kitchen.extras)
        write_manifest(
            folder,
            kind="mix",
            extra={
                **checks.facts(config, kitchen.options),
                **place.facts(),
                **facts(kitchen.sources, plan),
                "top_k": mixture.model.moe.top_k if mixture.model.moe else None,
                "history": history,
            },
        )
    return mixture.probe(lambda target: _value(kitchen, mixture.plan, target)) if mixture.probe else []


def _measured(kitchen: Kitchen, plan: Plan) -> Plan:
    """The plan with its statistics measured and put in."""
    if not plan.statistics:
        return plan
    with byte_progress(len(plan.statistics), "measure") as advance:
        values = measure(
            plan.statistics,
            kitchen.readers,
            plan.sources,
            seed=kitchen.config.rng_seed,
            workers=kitchen.workers,
            progress=lambda _: advance(1),
        )
    jobs = tuple(Job(job.target, job.info, with_values(job.expr, values)) for job in plan.jobs)
    return dataclasses.replace(plan, jobs=jobs, statistics={})


def _aside_jobs(kitchen: Kitchen, mixture: Mixture) -> tuple[Job, ...]:
    layouts = {name: reader.layout() for name, reader in kitchen.readers.items()}
    low = {name: lowered(expr, kitchen.sources) for name, expr in mixture.aside.items()}
    return tuple(Job(name, infer(expr, layouts), expr) for name, expr in low.items())


def _aside_bytes(kitchen: Kitchen, mixture: Mixture) -> int:
    return sum(job.info.nbytes for job in _aside_jobs(kitchen, mixture))


def _write_aside(kitchen: Kitchen, mixture: Mixture, folder: Path) -> None:
    """Tensors that later operations need, in a folder of their own that can be read, copied and deleted alone."""
    folder.mkdir()
    jobs = _aside_jobs(kitchen, mixture)
    targets = {job.target: job.info for job in jobs}
    readers = kitchen.readers
    plan = Plan(jobs, _used_layouts(jobs, readers))
    sink = SafetensorsSink(folder, targets, kitchen.config.shard_size)
    stream(plan, [], sink, "aside", workers=kitchen.workers, beside=readers)
    write_json(folder / ASIDE_JSON, dict(mixture.aside_facts))
    write_manifest(folder, kind=ASIDE_FOLDER)


def _used_layouts(jobs: tuple[Job, ...], readers: Mapping[str, TensorReader]) -> dict[str, Any]:
    used = {(take.source, take.name) for job in jobs for take in takes(job.expr)}
    return {
        name: {tensor: info for tensor, info in reader.layout().items() if (name, tensor) in used}
        for name, reader in readers.items()
    }


def _value(kitchen: Kitchen, plan: Plan, target: str) -> torch.Tensor:
    job = next(job for job in plan.jobs if job.target == target)
    expr = lowered(job.expr, kitchen.sources)
    return evaluate(expr, kitchen.readers, job.info, target, kitchen.config.rng_seed)
