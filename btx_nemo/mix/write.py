"""Where a mix goes: a Hugging Face folder or a Megatron checkpoint, made of the same plan over shared names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.checkpoints.tokenizer_files import copy_tokenizer, save_tokenizer
from btx_nemo.checkpoints.torch_dist_sink import DistSink
from btx_nemo.config.choice import check_choice
from btx_nemo.errors import UserError
from btx_nemo.families.architecture import (
    SHARED,
    Architecture,
    stored_dtype,
    write_settings,
)
from btx_nemo.families.base import to_megatron
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.source import Source, save_model_config
from btx_nemo.families.target import Target, choose_target
from btx_nemo.mix.config import MixConfig
from btx_nemo.plan.expr import Expr, bind, infer, substitute
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan

FORMATS = ("hf", "megatron")


@dataclass(frozen=True)
class Destination:
    """The kind of folder that a mixture becomes."""

    target: Target | None
    """Hugging Face's; None for a Megatron checkpoint."""
    shard_size: int

    @property
    def architecture(self) -> Architecture | None:
        """The target's."""
        return self.target.architecture if self.target else None

    def plan(self, plan: Plan, model: ModelConfig) -> Plan:
        """The plan over shared names, under the names that are written. Fresh tensors do not depend on these."""
        table: Mapping[str, Expr] = {job.target: bind(job.expr, job.target, job.info) for job in plan.jobs}
        infos = {job.target: job.info for job in plan.jobs}
        written = self.architecture.stored(model) if self.architecture else to_megatron(model, SHARED)
        jobs = []
        for name, expr in written.items():
            info = infer(expr, {SHARED: infos})
            if self.architecture:
                info = TensorInfo(info.shape, stored_dtype(self.architecture, name, None, info.dtype))
            jobs.append(Job(name, info, substitute(expr, SHARED, table)))
        return dataclasses.replace(plan, jobs=tuple(jobs))

    def facts(self) -> dict[str, str]:
        """What the manifest says of it."""
        if self.target is None:
            return {}
        return {"architecture": self.target.architecture.model_type, "chosen": self.target.chosen}

    def sink(self, folder: Path, plan: Plan) -> SafetensorsSink | DistSink:
        """Where the plan's tensors go."""
        targets = {job.target: job.info for job in plan.jobs}
        return SafetensorsSink(folder, targets, self.shard_size) if self.architecture else DistSink(folder, targets)

    def settings(self, folder: Path, model: ModelConfig, dtype: str, seed: Source) -> None:
        """Everything beside the tensors: settings and tokenizer."""
        if self.architecture:
            copy_tokenizer(seed.tokenizer, folder)
            write_settings(self.architecture, folder, model, dtype, seed.base)
        else:
            save_model_config(model, folder)
            save_tokenizer(seed.tokenizer, self.tokenizer(folder))

    def tokenizer(self, folder: Path) -> Path:
        """Where the tokenizer's files are."""
        return folder if self.architecture else folder / "tokenizer"


def destination(config: MixConfig, model: ModelConfig, base: Mapping[str, Any]) -> Destination:
    """Where `config` wants the mixture, which is to be trained. Raises UserError when no architecture holds it."""
    check_choice("format", config.format, FORMATS)
    if config.format == "megatron":
        if config.target is not None:
            raise UserError(f"target={config.target}: is an architecture of format=hf; leave one of them out")
        return Destination(None, config.shard_size)
    return Destination(choose_target(model, base, "mix", config.target, to_train=True), config.shard_size)
