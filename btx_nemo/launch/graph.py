"""The pipeline as a graph of jobs: which script makes what, from what. Pure: no file is read."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from btx_nemo.config.choice import check_choice
from btx_nemo.config.domains import check_domain
from btx_nemo.config.flat import flat
from btx_nemo.errors import UserError
from btx_nemo.launch.config import PipelineConfig, StageConfig

UNTIL = ("experts", "mix", "train", "export", "eval")
TRAININGS = {"router": "train_router.sh", "joint": "train_mix.sh"}
DEFAULTS = {
    "train_seed.sh": "tiny_seed",
    "train_expert.sh": "expert",
    "mix.sh": "btx",
    "train_router.sh": "router",
    "train_mix.sh": "mix",
}
"""The configuration that each script takes when it is given none."""
LONGEST = 150
"""Characters of a domain, and of a domain with a stage."""
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
    """Stages of this graph that it needs."""


@dataclass(frozen=True)
class Places:
    """Where a pipeline lives."""

    runs: Path
    seed: Path
    data: Path


def places(config: PipelineConfig) -> Places:
    """The folders of a pipeline, absolute. Raises UserError for a name that the scripts could not pass on."""
    runs = Path(config.runs).absolute()
    found = Places(runs, Path(config.seed or runs / "seed").absolute(), Path(config.data or runs / "data").absolute())
    for name in ("runs", "seed", "data"):
        folder = getattr(found, name)
        if re.search(r"['\\\\$\n]", str(folder)):
            raise UserError(
                f"{name}={str(folder)!r}: has a quote, a backslash, a dollar or a line break in it; use another folder"
            )
    return found


def graph(config: PipelineConfig, *, allow_missing: bool = False) -> list[Job]:
    """All jobs of a pipeline, each after those it needs. Raises UserError for a pipeline that cannot be."""
    _check(config)
    at = places(config)
    jobs = [*_roots(config, at), *_experts(config, at)]
    if config.until != "experts":
        jobs += _mixture(config, at, allow_missing)
    known = {job.name for job in jobs}
    return [dataclasses.replace(job, after=tuple(name for name in job.after if name in known)) for job in jobs]


def _check(config: PipelineConfig) -> None:
    if not config.experts:
        raise UserError("no domain; name at least one, e.g. btx-nemo submit math code prose")
    for domain, expert in config.experts.items():
        check_domain(domain, f"domain {domain!r}")
        for stage in expert.stages:
            if not STAGE.fullmatch(stage):
                raise UserError(
                    f"experts.{domain}.stages: {stage!r}: only a-z, 0-9, _ and - are allowed, a letter first; "
                    "rename the stage"
                )
        for name in (domain, *(f"{domain}.{stage}" for stage in expert.stages)):
            if len(name) > LONGEST:  # with what is put around it, it is the name of files
                raise UserError(f"{name[:40]}...: {len(name)} characters; {LONGEST} are allowed, choose a shorter name")
    check_choice("until", config.until, UNTIL)
    if config.train not in (["joint"], ["router"], ["router", "joint"]):
        raise UserError(f"train={config.train}: must be [joint], [router] or [router,joint]")
    if config.export.config or config.eval.config or config.eval.set:
        raise UserError("export has no config, and eval neither config nor set; remove them")
    if config.seed_training and config.seed:
        raise UserError(f"seed={config.seed} and seed_training: give one of them")
    if config.demo_data and config.data:
        raise UserError(f"data={config.data} and demo_data: give one of them")
    for name, value, least in (("max_restarts", config.max_restarts, 0), ("local_jobs", config.local_jobs, 1)):
        if value is not None and value < least:
            raise UserError(f"{name}={value}: must be {least} or more")


def _roots(config: PipelineConfig, at: Places) -> Iterator[Job]:
    if config.demo_data:
        yield Job(name="data", script="demo_data.sh", out=at.data, done=at.data)
    if config.seed_training:
        yield _training("seed", "train_seed.sh", (), config.seed_training, at, after=("data",))


def _experts(config: PipelineConfig, at: Places) -> Iterator[Job]:
    for domain, expert in config.experts.items():
        whole = _merged(config.expert, expert)
        start = at.seed
        before: tuple[str, ...] = ("data", "seed")
        for stage, own in expert.stages.items():
            name = f"expert-{domain}.{stage}"
            yield _expert(f"{domain}.{stage}", _merged(config.expert, own), at, start, before)
            start, before = at.runs / name / "hf", (name,)
        yield _expert(domain, whole, at, start, before)


def _expert(words: str, stage: StageConfig, at: Places, start: Path, after: tuple[str, ...]) -> Job:
    if start != at.seed and "init_from" not in stage.set:
        stage = dataclasses.replace(stage, set={**stage.set, "init_from": str(start)})
    given = stage.set.get("init_from", start)
    inputs = {"from": Path("null" if given is None else str(given))}
    return _training(f"expert-{words}", "train_expert.sh", (words,), stage, at, inputs=inputs, after=after)


def _mixture(config: PipelineConfig, at: Places, allow_missing: bool) -> Iterator[Job]:
    experts = [f"expert-{domain}" for domain in config.experts]
    mix = at.runs / "mix"
    yield Job(
        name="mix",
        script="mix.sh",
        args=(*config.experts, *(["--allow-missing"] if allow_missing else []), *_arguments(config.mix, "mix.sh")),
        options=_options(config.mix),
        out=mix,
        done=mix,
        inputs={"seed": at.seed} | {name: at.runs / name / "hf" for name in experts},
        after=("data", "seed", *experts),
    )
    last = "mix"
    for name in config.train if config.until != "mix" else ():
        words = (last,) if last != "mix" else ()
        stage = getattr(config, name)
        yield _training(name, TRAININGS[name], words, stage, at, inputs={last: at.runs / last}, after=(last,))
        last = name
    words = (last,) if last != "joint" else ()
    export, evaluation = at.runs / "export", at.runs / "eval"
    if config.until in ("export", "eval"):
        yield Job(
            name="export",
            script="export.sh",
            args=(*words, *_arguments(config.export, "export.sh")),
            options=_options(config.export),
            out=export,
            done=export,
            inputs={last: at.runs / last},
            after=(last,),
        )
    if config.until == "eval":
        yield Job(
            name="eval",
            script="eval.sh",
            args=words,
            options=_options(config.eval),
            out=evaluation,
            done=evaluation / "DONE",
            inputs={last: at.runs / last, "export": export},
            after=(last, "export"),
        )


def _training(
    name: str,
    script: str,
    words: tuple[str, ...],
    stage: StageConfig,
    at: Places,
    *,
    inputs: Mapping[str, Path] | None = None,
    after: tuple[str, ...],
) -> Job:
    out = at.runs / name
    return Job(
        name=name,
        script=script,
        args=(*words, *_arguments(stage, script)),
        options=_options(stage),
        out=out,
        done=out / "DONE",
        inputs=inputs or {},
        after=after,
    )


def _merged(shared: StageConfig, own: StageConfig) -> StageConfig:
    """`own`, with what it leaves open from `shared`; settings one by one."""
    fields = [field.name for field in dataclasses.fields(StageConfig)]
    values = {name: getattr(own, name) for name in fields}
    for name in fields:
        if values[name] is None:
            values[name] = getattr(shared, name)
    values["set"] = {**flat(shared.set), **flat(own.set)}
    values["sbatch"] = [*shared.sbatch, *own.sbatch]
    return StageConfig(**values)


def _options(stage: StageConfig) -> tuple[str, ...]:
    gres = None if stage.gpus is None else f"gpu:{stage.gpus}" if stage.gpus else "none"
    named = {"nodes": stage.nodes, "gres": gres, "time": stage.time}
    return (*(f"--{name}={value}" for name, value in named.items() if value is not None), *stage.sbatch)


def _arguments(stage: StageConfig, script: str) -> tuple[str, ...]:
    config = stage.config or DEFAULTS.get(script)
    flags = {"config-name": config, "config-path": stage.config_path and os.path.abspath(stage.config_path)}
    return (
        *(f"--{name}={value}" for name, value in flags.items() if value),
        *(f"{key}={spell(value)}" for key, value in flat(stage.set).items()),
    )


def spell(value: Any) -> str:
    """A value as Hydra's grammar reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(spell, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{spell(item)}' for key, item in value.items())}}}"
    text = str(value)
    simple = re.fullmatch(r"[A-Za-z/.][A-Za-z0-9_/.-]*", text) and text.lower() not in ("null", "true", "false")
    if not isinstance(value, str) or (simple and text.lower() not in ("nan", "inf")):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
