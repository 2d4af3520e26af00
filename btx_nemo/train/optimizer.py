"""Megatron's distributed AdamW, its parameter groups and its learning-rate schedule."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch

from btx_nemo.config.choice import check_choice
from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.megatron.compat import mend_mixed_dtypes, mend_offloaded_fp32, version_without_transformer_engine
from btx_nemo.megatron.precision import optimizer_settings

DECAYS = ("cosine", "linear", "constant", "wsd")
ANNEALS = ("linear", "cosine", "exponential", "minus_sqrt")
UNITS = ("steps", "samples", "tokens")
ROUTERS = "*.mlp.router.*"


def check_optim(config: TrainConfig) -> None:
    """Raises UserError for an optimizer or a schedule that cannot be."""
    optim = config.optim
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
    if optim.router_min_lr is not None and optim.router_lr is None:
        raise UserError(f"optim.router_min_lr={optim.router_min_lr}: without optim.router_lr; give it as well")
    if optim.router_lr is not None and not 0 <= optim.router_lr < float("inf"):
        raise UserError(f"optim.router_lr={optim.router_lr}: must be a number that is not negative")
    if not 0 <= optim.offload <= 1:
        raise UserError(f"optim.offload={optim.offload}: must be a fraction between 0 and 1")
    router_lr, router_min_lr = router_rates(config)
    if not 0 <= router_min_lr <= router_lr:
        raise UserError(f"optim.router_min_lr={router_min_lr} must lie between 0 and optim.router_lr={router_lr}")
    _check_schedule(config)


def _check_schedule(config: TrainConfig) -> None:
    optim = config.optim
    check_choice("optim.decay", optim.decay, DECAYS)
    check_choice("optim.anneal", optim.anneal, ANNEALS)
    check_choice("optim.schedule_unit", optim.schedule_unit, UNITS)
    per_step = _units_per_step(config)
    end = optim.decay_steps if optim.decay_steps is not None else max(config.steps, 1) * per_step
    if end < 1:
        raise UserError(f"optim.decay_steps={end}: must be 1 or more")
    if not 0 <= optim.warmup_steps < end:
        what = f"steps={config.steps}" if optim.decay_steps is None else f"optim.decay_steps={end}"
        unit = f" ({end} {optim.schedule_unit})" if optim.schedule_unit != "steps" and optim.decay_steps is None else ""
        raise UserError(f"optim.warmup_steps={optim.warmup_steps} must be below {what}{unit}")
    if (optim.decay == "wsd") != (optim.anneal_steps is not None):
        raise UserError(f"optim.decay={optim.decay} and anneal_steps={optim.anneal_steps}: wsd needs it, others do not")
    if optim.anneal_steps is not None and not 0 < optim.anneal_steps <= end - optim.warmup_steps:
        raise UserError(
            f"optim.anneal_steps={optim.anneal_steps}: must lie between 1 and the {end - optim.warmup_steps} "
            f"{optim.schedule_unit} from the warm-up to the end of the decay"
        )


def _units_per_step(config: TrainConfig) -> int:
    samples = config.global_batch_size
    return {"steps": 1, "samples": samples, "tokens": samples * config.data.seq_length}[config.optim.schedule_unit]


def router_rates(config: TrainConfig) -> tuple[float, float]:
    """Peak and final learning rate of the routers."""
    optim = config.optim
    if optim.router_lr is None:
        return optim.lr, optim.min_lr
    if optim.router_min_lr is not None:
        return optim.router_lr, optim.router_min_lr
    return optim.router_lr, optim.min_lr * optim.router_lr / optim.lr if optim.lr else 0.0


def build_optimizer(config: TrainConfig, wrapped: list[Any]) -> tuple[Any, Any]:
    """(optimizer, scheduler) for a model's pipeline chunks wrapped in Megatron's DistributedDataParallel."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optim = config.optim
    with version_without_transformer_engine():
        settings = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            use_distributed_optimizer=True,
            **optimizer_settings(config),
            **_offload_settings(config.optim.offload),
        )
    # Megatron cuts this rank's part out of fp32 parameters; an offloaded optimizer takes no part with a history.
    with torch.set_grad_enabled(not config.optim.offload):
        optimizer = get_megatron_optimizer(settings, wrapped, config_overrides=_parameter_groups(config))
    mend_mixed_dtypes(optimizer)
    mend_offloaded_fp32(optimizer)
    # Megatron counts in whatever `step` is given, here in optimizer steps: other units become parts of them.
    per_step = _units_per_step(config)
    end = optim.decay_steps / per_step if optim.decay_steps is not None else max(config.steps, 1)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.warmup_steps / per_step,
        lr_decay_steps=end,
        lr_decay_style="WSD" if optim.decay == "wsd" else optim.decay,
        wsd_decay_steps=optim.anneal_steps / per_step if optim.anneal_steps is not None else None,
        lr_wsd_decay_style=optim.anneal,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=max(config.steps, 1),
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _offload_settings(fraction: float) -> dict[str, Any]:
    """Keywords of Megatron's OptimizerConfig for an optimizer of which a fraction is on the host."""
    if not fraction:
        return {}
    return dict(
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction,
        overlap_cpu_optimizer_d2h_h2d=True,
        use_precision_aware_optimizer=True,  # as Megatron asks for: the optimizer keeps the main weights itself
    )


def _parameter_groups(config: TrainConfig) -> dict[Any, Any]:
    """What differs from the rest, in Megatron's own terms: which parameters -> their rates and decay."""
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

    def has_no_decay(parameter: torch.nn.Parameter, name: str) -> bool:
        router = not config.optim.decay_routers and _is_router(parameter, name)
        return parameter.dim() == 1 or name.endswith(".bias") or router

    groups: dict[Any, Any] = {
        ParamKey(with_name_predicate=ParamWithNamePredicate(name="no decay", fn=has_no_decay)): {"wd_mult": 0.0}
    }
    if config.optim.router_lr is not None:
        lr, min_lr = router_rates(config)
        key = ParamKey(with_name_predicate=ParamWithNamePredicate(name="routers", fn=_is_router))
        groups[key] = {"max_lr": lr, "min_lr": min_lr}
    return groups


def _is_router(parameter: torch.nn.Parameter, name: str) -> bool:
    return fnmatch.fnmatchcase(name, ROUTERS)
