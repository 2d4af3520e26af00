"""The pipeline as a graph of jobs: which script makes what, from what. No file is read; links are followed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.config.choice import check_choice
from btx_nemo.config.domains import check_domain
from btx_nemo.errors import UserError
from btx_nemo.launch.config import ExpertConfig, PipelineConfig, StageConfig
from btx_nemo.launch.places import Places, places, within
from btx_nemo.launch.words import arguments, merged, options

UNTIL = ("experts", "mix", "train", "export", "eval")
TRAININGS = {"router": "train_router.sh", "joint": "train_mix.sh"}
LONGEST = 150
"""Characters of a domain, and of a domain with a stage."""
DATA = ("data", "chats")
"""Stages that all trainings need, where the pipeline makes its data itself."""
STAGE = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stage of the pipeline: a script with its arguments, and the folder it makes."""

    name: str
    """Of the stage: seed, expert-math, mix, ..."""
    script: str
    """File in slurm/."""
    args: tuple[str, ...] = ()
    """Arguments of the script."""
    options: tuple[str, ...] = ()
    """Options of sbatch."""
    out: Path
    """The folder it makes."""
    done: Path
    """Exists when it is finished."""
    inputs: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    """What it is made of, by the names that the script records."""
    after: tuple[str, ...] = ()
    """Stages of this graph that it waits for: those that make what it is made of, and `DATA`."""


def graph(config: PipelineConfig, *, allow_missing: bool = False) -> list[Job]:
    """All jobs of a pipeline, each after those it needs. Raises UserError for a pipeline that cannot be."""
    _check(config)
    at = places(config)
    jobs = [*_roots(config, at), *_experts(config, at)]
    if config.until != "experts":
        jobs += _mixture(config, at, allow_missing)
    return list(_linked(jobs))


def _linked(jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs, each after those of this graph that it names, and after those that make what it is made of.

    Raises UserError for one that is made of itself or of what comes after it.
    """
    before: list[Job] = []
    for number, job in enumerate(jobs):
        for other in jobs[number:]:
            if within(other.out, job.inputs.values()):
                raise UserError(
                    f"{job.name}: starts from {other.out}, which {other.name} makes, not before it; name another"
                )
        makers = [one.name for one in before if within(one.out, job.inputs.values())]
        known = [name for name in job.after if any(name == one.name for one in before)]
        before.append(dataclasses.replace(job, after=tuple(dict.fromkeys([*known, *makers]))))
        yield before[-1]


def _check(config: PipelineConfig) -> None:
    if not config.experts:
        raise UserError("no domain; name at least one, e.g. btx-nemo submit math code prose")
    for domain, expert in config.experts.items():
        check_domain(domain, f"domain {domain!r}")
        stages = {**config.expert.stages, **expert.stages}
        for stage in stages:
            if not STAGE.fullmatch(stage):
                raise UserError(
                    f"experts.{domain}.stages: {stage!r}: only a-z, 0-9, _ and - are allowed, a letter first; "
                    "rename the stage"
                )
        for name in (domain, *(f"{domain}.{stage}" for stage in stages)):
            if len(name) > LONGEST:  # with what is put around it, it is the name of files
                raise UserError(f"{name[:40]}...: {len(name)} characters; {LONGEST} are allowed, choose a shorter name")
    if config.pair is None and (config.anchor or config.anchor_training):
        raise UserError("an anchor stands beside the experts in pairs; give pair.config=two_expert, or no anchor")
    if config.pair is not None and "anchor" in config.experts:
        raise UserError("domain 'anchor': has another meaning in a pair; rename the domain")
    check_choice("until", config.until, UNTIL)
    if config.train not in (["joint"], ["router"], ["router", "joint"]):
        raise UserError(f"train={config.train}: must be [joint], [router] or [router,joint]")
    if config.export.config or config.eval.config or config.eval.set:
        raise UserError("export has no config, and eval neither config nor set; remove them")
    for name, made in (
        ("seed", "seed_training"),
        ("anchor", "anchor_training"),
        ("data", "demo_data"),
        ("chats", "demo_chats"),
    ):
        if getattr(config, name) and getattr(config, made):
            raise UserError(f"{name}={getattr(config, name)} and {made}: give one of them")
    for name, value, least in (("max_restarts", config.max_restarts, 0), ("local_jobs", config.local_jobs, 1)):
        if value is not None and value < least:
            raise UserError(f"{name}={value}: must be {least} or more")


def _roots(config: PipelineConfig, at: Places) -> Iterator[Job]:
    if config.demo_data:
        yield Job(name="data", script="demo_data.sh", out=at.data, done=at.data)
    if config.demo_chats:
        yield Job(name="chats", script="demo_data.sh", args=("chats",), out=at.chats, done=at.chats, after=("data",))
    if config.seed_training:
        yield _training("seed", "train_seed.sh", (), config.seed_training, at, after=("data",))
    if config.anchor_training:
        inputs = {"from": _start(config.anchor_training, at.seed)}
        yield _training("anchor", "train_anchor.sh", (), config.anchor_training, at, inputs=inputs)


def _experts(config: PipelineConfig, at: Places) -> Iterator[Job]:
    for domain, expert in config.experts.items():
        trainings = _trainings(domain, config.expert, expert)
        start = at.seed
        if config.pair and "init_from" not in next(iter(trainings.values())).set:
            yield _pair(domain, config.pair, at)
            start = at.runs / f"pair-{domain}"
        for words, stage in trainings.items():
            yield _expert(words, stage, at, start)
            start = _result(at.runs / f"expert-{words}", stage)


def _trainings(domain: str, shared: ExpertConfig, expert: ExpertConfig) -> dict[str, StageConfig]:
    """The trainings of a domain, in order, by the words that name them; the last is the expert's own.

    Raises UserError where one that is not the first has a start of its own: nobody would use what is trained before.
    """
    found = {}
    for name in {**shared.stages, **expert.stages}:
        common = shared.stages.get(name)
        own = expert.stages.get(name, None if common is None else StageConfig())
        if own is not None:
            found[f"{domain}.{name}"] = merged(merged(shared, common or StageConfig()), own)
    found[domain] = merged(shared, expert)
    first, *later = found
    stage = first.partition(".")[2]
    for words in later:
        if "init_from" in found[words].set:
            raise UserError(
                f"expert-{words}: set.init_from: of several trainings only the first has a start of its own; "
                f"give it there: experts.{domain}.stages.{stage}.set.init_from, or leave out what is before: "
                f"experts.{domain}.stages.{stage}=null"
            )
    return found


def _pair(domain: str, stage: StageConfig, at: Places) -> Job:
    out = at.runs / f"pair-{domain}"
    return Job(
        name=out.name,
        script="pair.sh",
        args=(domain, *arguments(stage, "pair.sh")),
        options=options(stage),
        out=out,
        done=out,
        inputs={"seed": at.anchor, f"expert-{domain}": at.seed},
    )


def _expert(words: str, stage: StageConfig, at: Places, start: Path) -> Job:
    if start != at.seed and "init_from" not in stage.set:
        stage = dataclasses.replace(stage, set={**stage.set, "init_from": str(start)})
    inputs = {"from": _start(stage, start)}
    return _training(f"expert-{words}", "train_expert.sh", (words,), stage, at, inputs=inputs)


def _result(run: Path, stage: StageConfig) -> Path:
    """What a training leaves for those after it: its export, or the run itself where that is left out."""
    return run if stage.set.get("export") is False else run / "hf"


def _start(stage: StageConfig, otherwise: Path) -> Path:
    """What a training starts from."""
    given = stage.set.get("init_from", otherwise)
    return Path("null" if given is None else str(given))


def _mixture(config: PipelineConfig, at: Places, allow_missing: bool) -> Iterator[Job]:
    experts = {
        f"expert-{domain}": _result(at.runs / f"expert-{domain}", merged(config.expert, expert))
        for domain, expert in config.experts.items()
    }
    mix = at.runs / "mix"
    yield Job(
        name="mix",
        script="mix.sh",
        args=(*config.experts, *(["--allow-missing"] if allow_missing else []), *arguments(config.mix, "mix.sh")),
        options=options(config.mix),
        out=mix,
        done=mix,
        inputs={"seed": at.anchor} | experts,
    )
    last = "mix"
    for name in config.train if config.until != "mix" else ():
        words = (last,) if last != "mix" else ()
        stage = getattr(config, name)
        yield _training(name, TRAININGS[name], words, stage, at, inputs={last: at.runs / last})
        last = name
    words = (last,) if last != "joint" else ()
    export, evaluation = at.runs / "export", at.runs / "eval"
    if config.until in ("export", "eval"):
        yield Job(
            name="export",
            script="export.sh",
            args=(*words, *arguments(config.export, "export.sh")),
            options=options(config.export),
            out=export,
            done=export,
            inputs={last: at.runs / last},
        )
    if config.until == "eval":
        yield Job(
            name="eval",
            script="eval.sh",
            args=words,
            options=options(config.eval),
            out=evaluation,
            done=evaluation / "DONE",
            inputs={last: at.runs / last, "export": export},
        )


def _training(
    name: str,
    script: str,
    words: tuple[str, ...],
    stage: StageConfig,
    at: Places,
    *,
    inputs: Mapping[str, Path] | None = None,
    after: tuple[str, ...] = DATA,
) -> Job:
    out = at.runs / name
    return Job(
        name=name,
        script=script,
        args=(*words, *arguments(stage, script)),
        options=options(stage),
        out=out,
        done=out / "DONE",
        inputs=inputs or {},
        after=after,
    )
