"""Megatron's distributed AdamW and its learning-rate schedule."""

from __future__ import annotations

from typing import Any

from btx_nemo.config.choice import check_choice
from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.megatron.compat import mend_mixed_dtypes
from btx_nemo.megatron.model import DTYPES

DECAYS = ("cosine", "linear", "constant")


def check_optim(config: TrainConfig) -> None:
    """Raises UserError for a schedule that cannot be."""
    optim = config.optim
    check_choice("optim.decay", optim.decay, DECAYS)
    if not 0 <= optim.min_lr <= optim.lr:
        raise UserError(f"optim.min_lr={optim.min_lr} must lie between 0 and optim.lr={optim.lr}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optim, name) < 1:
            raise UserError(f"optim.{name}={getattr(optim, name)}: must lie between 0 and 1, without 1")
    if not optim.eps > 0:
        raise UserError(f"optim.eps={optim.eps}: must be positive")
    for name in ("lr", "eps", "weight_decay", "clip_grad"):
        if not 0 <= getattr(optim, name) < float("inf"):
            raise UserError(f"optim.{name}={getattr(optim, name)}: must be a number that is not negative")
    if not 0 <= optim.warmup_steps < max(config.steps, 1):
        raise UserError(f"optim.warmup_steps={optim.warmup_steps} must be below steps={config.steps}")


def build_optimizer(config: TrainConfig, wrapped: list[Any]) -> tuple[Any, Any]:
    """(optimizer, scheduler) for a model's pipeline chunks wrapped in Megatron's DistributedDataParallel."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optim = config.optim
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=config.precision == "bf16",
            params_dtype=DTYPES[config.precision],
            use_distributed_optimizer=True,
        ),
        wrapped,
    )
    mend_mixed_dtypes(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.warmup_steps,
        lr_decay_steps=max(config.steps, 1),
        lr_decay_style=optim.decay,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=max(config.steps, 1),
        wd_incr_style="constant",
    )
    return optimizer, scheduler
