"""What tests run on gloo ranks. Every function is called on all ranks of a layout at once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from btx_nemo.config.schema import (
    DataConfig,
    DropoutConfig,
    Fp8Config,
    LayoutConfig,
    MoEOverride,
    OptimConfig,
    RouterConfig,
    TrainConfig,
)


def logits(folder: str, layout: dict[str, int], tokens: torch.Tensor) -> torch.Tensor | None:
    """fp32 logits [B, S, V] of a checkpoint in Megatron; on ranks of the last pipeline stage, None elsewhere."""
    from btx_nemo.convert.logits import megatron_logits

    return megatron_logits(Path(folder), tokens, LayoutConfig(**layout))


def one_step(folder: str, layout: dict[str, int], batch: dict[str, torch.Tensor], options: dict[str, Any]) -> dict:
    """Loss, gradient norm, balance loss and routing of one training step on a global batch, and the loss after it.

    `batch` holds the global batch [G, S]; options: steps, micro_batch_size, and those of `settings`. `calls` is how
    often each module of the model was called in a micro-batch of these steps, `rows` the sizes of experts' batches.
    """
    from megatron.core import parallel_state as mpu

    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.routing import collect_routing, reset_routing
    from btx_nemo.train.setup import build_trainee
    from btx_nemo.train.source import open_source
    from btx_nemo.train.step import train_step

    config = settings(layout, options, OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=0))
    source = open_source(Path(folder), config.moe, config.router)
    with parallel_state(config.layout, seed=1):
        trainee = build_trainee(config, source)
        dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        size = options.get("micro_batch_size", 1)
        total = batch["tokens"].shape[0]
        microbatches = total // (size * dp_size)

        def batches():
            while True:
                for m in range(microbatches):
                    first = (m * dp_size + dp_rank) * size
                    yield {key: value[first : first + size] for key, value in batch.items()}

        calls: Counter[str] = Counter()
        rows: set[int] = set()
        for name, module in trainee.gpt.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
            if re.search(r"\.local_experts\.\d+$", name):
                module.register_forward_pre_hook(lambda _, inputs: rows.add(len(inputs[0])))
        data, history = batches(), []
        for _ in range(options.get("steps", 2)):
            reset_routing(trainee.gpt)
            result = train_step(
                trainee, data, microbatches=microbatches, micro_batch_size=size, seq_length=batch["tokens"].shape[1]
            )
            routing = collect_routing(trainee.gpt, source.model)
            history.append(
                {
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "losses": routing.losses if routing else None,
                    "load": routing.load if routing else None,
                }
            )
        passes = microbatches * len(history)
        return {"history": history, "calls": {name: count / passes for name, count in calls.items()}, "rows": rows}


def padded_step(folder: str, layout: dict[str, int], batch: dict[str, torch.Tensor], options: dict[str, Any]) -> dict:
    """`one_step` with FP8 in the configuration, on the CPU: experts' tokens are padded for it, numbers are not cut.

    Megatron's check asks for Transformer Engine's version; without the package its FP8 contexts do nothing.
    """
    from unittest import mock

    from megatron.core import utils
    from megatron.core.transformer.moe import token_dispatcher
    from packaging.version import Version

    padding = mock.patch.object(token_dispatcher, "pad_routing_map", wraps=token_dispatcher.pad_routing_map)
    with mock.patch.object(utils, "_te_version", Version("2.8.0")), padding as pads:
        return {**one_step(folder, layout, batch, options), "routing_padded": pads.called}


def settings(layout: dict[str, int], options: dict[str, Any], optim: OptimConfig) -> TrainConfig:
    """A run's configuration, for building a trainee.

    options: router, moe, precision, fp8, recompute, recompute_modules, freeze, train, dropout, per_token_loss.
    """
    return TrainConfig(
        stage="mix",
        out="unused",
        data=DataConfig(path="unused", seq_length=16),
        layout=LayoutConfig(**layout),
        precision=options.get("precision", "fp32"),
        recompute=options.get("recompute", "none"),
        recompute_modules=options.get("recompute_modules", ["core_attn"]),
        steps=100,
        micro_batch_size=1,
        global_batch_size=2,
        optim=optim,
        moe=MoEOverride(**options.get("moe", {})),
        fp8=Fp8Config(**options.get("fp8", {})),
        router=RouterConfig(**options.get("router", {})),
        dropout=DropoutConfig(**options.get("dropout", {})),
        per_token_loss=options.get("per_token_loss", False),
        freeze=options.get("freeze", []),
        train=options.get("train", []),
        seed=1,
    )


def random_batch(vocab_size: int, total: int, length: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """A global batch as the sampler makes it."""
    ids = torch.randint(0, vocab_size, (total, length + 1), generator=torch.Generator().manual_seed(seed))
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(total, length),
        "position_ids": torch.arange(length)[None].expand(total, -1).contiguous(),
    }


def context_parallel_parts(ranks: int, length: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A micro-batch as this context-parallel rank has it, by us and by Megatron."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    from btx_nemo.megatron.compat import supported
    from btx_nemo.megatron.parallel import context_parallel_part, parallel_state

    batch = random_batch(256, total=2, length=length)
    with parallel_state(LayoutConfig(cp=ranks), seed=1):
        theirs = get_batch_on_this_cp_rank(dict(batch), **supported(get_batch_on_this_cp_rank, is_hybrid_cp=False))
        return context_parallel_part(batch), theirs
