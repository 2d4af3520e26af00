"""What a pipeline can be told. `conf/submit/*.yaml` fill these classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One job: which configuration, with which settings, on how much of the cluster. None: as the script has it."""

    config: str | None = None
    """Name in conf/train, or in conf/mix for the mix."""
    config_path: str | None = None
    """Folder instead of those."""
    set: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from the configuration, e.g. {steps: 2000, optim: {lr: 5e-5}}."""
    nodes: int | None = None
    """Nodes of the job."""
    gpus: int | None = None
    """GPUs of each node; 0 for none."""
    time: str | None = None
    """Time limit as sbatch takes it, e.g. "12:00:00": with its quotes, since YAML reads 12:00:00 as 43200.
    At the limit a training saves, requeues itself and resumes."""
    sbatch: list[str] = field(default_factory=list)
    """Further options of sbatch, e.g. [--partition=gpu, --exclusive]."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(StageConfig):
    """One specialist; what it leaves open it takes from `expert`, and a stage of its from the same stage there."""

    stages: dict[str, StageConfig | None] = field(default_factory=dict)
    """Trainings before the expert's own, each started from the one before, e.g. {mid: {config: bar_midtrain}}; null
    leaves out one that `expert` has, in `expert` itself one of all. What a stage leaves open it takes from `expert`.
    Only the first training may have a start of its own (`set.init_from`)."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The whole method as a graph of jobs."""

    runs: str
    """Folder of all runs, and of the pipeline's state."""
    seed: str | None = None
    """The model that the specialists start from; None: `runs`/seed."""
    anchor: str | None = None
    """The model that stands beside each expert in a pair, and is the seed of the mix; None: `runs`/anchor where there
    is `anchor_training`, else the seed."""
    data: str | None = None
    """Prepared text; None: `runs`/data."""
    chats: str | None = None
    """Prepared conversations; None: `runs`/chats."""
    demo_data: bool = False
    """Make the demo's three domains first."""
    demo_chats: bool = False
    """Make conversations of the demo's text first."""
    seed_training: StageConfig | None = None
    """Train a fresh seed first."""
    anchor_training: StageConfig | None = None
    """Train the anchor, from the seed, first."""
    pair: StageConfig | None = None
    """Assembling, before the trainings of each expert, the two-expert model that they train: the anchor, and an expert
    that starts from the seed; `config` is the recipe. None: they train the seed itself. An expert whose first training
    has a start of its own (`set.init_from`) trains that, and has no pair made."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """What all specialists share."""
    experts: dict[str, ExpertConfig] = field(default_factory=dict)
    """Specialists by domain, in the order that the mix has them."""
    mix: StageConfig = field(default_factory=StageConfig)
    """Assembling; `config` is the recipe."""
    train: list[str] = field(default_factory=lambda: ["joint"])
    """How the mixture trains, in order: joint (everything), router (the routers alone), or router and then joint."""
    router: StageConfig = field(default_factory=StageConfig)
    """Training of the routers."""
    joint: StageConfig = field(default_factory=StageConfig)
    """Training of the whole mixture."""
    export: StageConfig = field(default_factory=StageConfig)
    """The trained mixture as a Hugging Face folder; it has no `config`."""
    eval: StageConfig = field(default_factory=StageConfig)
    """The export's logits against the training's, and a table of losses; it has neither `config` nor `set`."""
    until: str = "eval"
    """The last stage: experts, mix, train, export or eval."""
    max_restarts: int | None = None
    """Requeues of a job before it gives up; None: BTX_MAX_RESTARTS, else 10."""
    requeue_on_failure: bool | None = None
    """Requeue after a crash too, not only before the time limit; None: BTX_REQUEUE_ON_FAILURE, else false."""
    local_jobs: int = 1
    """Without Slurm: jobs at the same time."""
