"""The model that trains: built, given its weights, frozen in part, wrapped, with its optimizer."""

from __future__ import annotations

from typing import Any

from btx_nemo.config.schema import TrainConfig
from btx_nemo.megatron.load import load_weights
from btx_nemo.megatron.model import build_model, chunks
from btx_nemo.megatron.precision import Device, transformer_settings
from btx_nemo.train.average import Average
from btx_nemo.train.dropout import install_dropout
from btx_nemo.train.freeze import freeze
from btx_nemo.train.optimizer import build_optimizer
from btx_nemo.train.source import ModelSource
from btx_nemo.train.step import Trainee


def build_trainee(config: TrainConfig, source: ModelSource, *, documents: bool = False) -> Trainee:
    """This rank's share of the model, its weights read slice by slice from `source`. Needs `parallel_state` entered.

    `documents` says whether a sequence may hold several, each for itself.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    gpt: Any = build_model(
        source.model,
        config.layout,
        precision=config.precision,
        router=config.router,
        recompute=config.recompute,
        recompute_modules=config.recompute_modules,
        per_token_loss=config.per_token_loss,
        settings=transformer_settings(config, source.model, Device.here()),
        documents=documents,
    )
    load_weights(gpt, source.expressions, source.readers, seed=config.seed)
    freeze(gpt, config)
    install_dropout(gpt, config.dropout)
    transformer_config = gpt.config
    modules = chunks(gpt)
    if config.precision != "fp32":
        from megatron.core.transformer.module import Float16Module

        modules = [Float16Module(transformer_config, chunk) for chunk in modules]
    wrapped = [
        DistributedDataParallel(
            transformer_config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            module,
        )
        for module in modules
    ]
    transformer_config.finalize_model_grads_func = finalize_model_grads
    optimizer, scheduler = build_optimizer(config, wrapped)
    transformer_config.grad_scale_func = optimizer.scale_loss
    average = Average(config.ema.decay, optimizer) if config.ema.decay else None
    return Trainee(gpt=gpt, wrapped=wrapped, optimizer=optimizer, scheduler=scheduler, average=average)
