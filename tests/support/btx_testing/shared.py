"""Models in memory and on disk by their shared names; recipes on tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.checkpoints.torch_dist_sink import DistSink
from btx_nemo.config.build import build
from btx_nemo.families.architecture import SHARED
from btx_nemo.families.base import layout, to_megatron
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.source import save_model_config
from btx_nemo.mix.recipes import get_recipe
from btx_nemo.mix.recipes.base import Ingredients
from btx_nemo.plan.execute import evaluate, execute
from btx_nemo.plan.expr import infer
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.statistics import measure, with_values
from btx_testing.tensors import MemoryReader, info_of

SMALLEST = ModelConfig(
    num_layers=2, hidden_size=4, ffn_hidden_size=4, num_attention_heads=2, num_query_groups=1, head_dim=2, vocab_size=5
)


def random_tensors(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a model, random."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(info.shape, generator=generator) for name, info in layout(model, "float32").items()}


def apply_recipe(
    recipe: str,
    sources: Mapping[str, Mapping[str, torch.Tensor]],
    model: ModelConfig = SMALLEST,
    rng_seed: int = 0,
    top_k: int | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """The result of a recipe on tensors in memory; the first source is the seed."""
    found = get_recipe(recipe)
    readers = {name: MemoryReader(tensors) for name, tensors in sources.items()}
    layouts = {name: reader.layout() for name, reader in readers.items()}
    seed, *experts = sources
    given = Ingredients(
        layouts=layouts,
        seed=seed,
        experts=tuple(experts),
        model=model,
        models=dict.fromkeys(experts, model),
        options=build(found.options, options, where=recipe),
        top_k=top_k,
        router_init_std=None,
        rng_seed=rng_seed,
        dtype=None,
    )
    plan = found.plan(given).plan
    plan.check()
    values = measure(plan.statistics, readers, layouts, seed=rng_seed)
    return {
        job.target: evaluate(with_values(job.expr, values), readers, job.info, job.target, rng_seed)
        for job in plan.jobs
    }


def write_checkpoint(folder: Path, model: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A Megatron checkpoint of tensors that are given by their shared names, as a training run leaves it."""
    reader = MemoryReader(dict(tensors))
    infos = {SHARED: {name: info_of(tensor) for name, tensor in tensors.items()}}
    jobs = tuple(Job(key, infer(expr, infos), expr) for key, expr in to_megatron(model, SHARED).items())
    folder.mkdir(parents=True)
    sink = DistSink(folder, {job.target: job.info for job in jobs})
    execute(Plan(jobs, infos), {SHARED: reader}, sink)
    sink.close()
    save_model_config(model, folder)
    write_manifest(folder, kind="checkpoint")
    return folder
