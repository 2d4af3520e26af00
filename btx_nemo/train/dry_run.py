"""`btx-nemo train --dry-run`: what a run would be, after all its checks, with nothing built or written."""

from __future__ import annotations

import dataclasses

from btx_nemo.config.schema import TrainConfig
from btx_nemo.data.blend import normalise_weights
from btx_nemo.megatron.parallel import world_size
from btx_nemo.train.contents import blend_of
from btx_nemo.train.length import with_steps
from btx_nemo.train.names import frozen_names, grouped, parameter_sizes
from btx_nemo.train.prepare import Prepared, prepare


def dry_run(config: TrainConfig) -> None:
    """Prints all that a run would be. Raises UserError as `train` does before it builds anything."""
    config = with_steps(config)
    prepared = prepare(config)
    sections = {
        "stage": [_stage(config, prepared)],
        **_parameters(config, prepared),
        "data": _data(config, prepared),
        "length": [_length(config)],
        "layout": [_layout(config)],
        "schedule": [_schedule(config)],
    }
    if prepared.source.model.moe is not None:
        losses = ", ".join(f"{name} {weight:g}" for name, weight in config.router.losses.items() if weight)
        rows = f"; rows {config.router.frozen_rows} frozen" if config.router.frozen_rows else ""
        sections["routing"] = [f"losses: {losses or 'none'}{rows}"]
    sections["out"] = [f"{prepared.out}{' (there already: the run would resume)' if prepared.out.exists() else ''}"]
    for name, lines in sections.items():
        for number, line in enumerate(lines):
            print(f"{'' if number else name:9} {line}".rstrip())


def _stage(config: TrainConfig, prepared: Prepared) -> str:
    model = prepared.source.model
    moe = model.moe
    kind = f"{moe.num_experts} experts, {moe.router}, top_k {moe.top_k}" if moe else "dense"
    return f"{config.stage}, from {config.init_from or 'a fresh model'}: {model.family}, {kind}"


def _parameters(config: TrainConfig, prepared: Prepared) -> dict[str, list[str]]:
    sizes = parameter_sizes(prepared.source.model)
    rows = grouped(sizes, frozen_names(list(sizes), config))
    total = sum(sizes.values())
    sections = {}
    for title, trains in (("trains", True), ("frozen", False)):
        chosen = [row for row in rows if row[3] is trains]
        elements = sum(row[2] for row in chosen)
        lines = [f"{elements:,} of {total:,} parameters ({elements / total:.1%})"]
        width = max((len(row[0]) for row in chosen), default=0)
        lines += [f"  {name:{width}} {tensors:6,} x {size // tensors:,}" for name, tensors, size, _ in chosen]
        sections[title] = lines if chosen else ["nothing"]
    return sections


def _data(config: TrainConfig, prepared: Prepared) -> list[str]:
    blend, valid = blend_of(config)
    shares = normalise_weights(blend, list(blend))
    lines = []
    for domain, content in prepared.contents.items():
        share = "all of it" if config.epochs is not None else f"{shares[domain]:.2%}"
        lines.append(f"{domain} ({share}): {content.text(config.data.seq_length)}")
    sample = f"; a sample of {config.data.sample:g} of the documents" if config.data.sample != 1 else ""
    apart = "; documents kept apart" if prepared.documents else ""
    return [*lines, f"validated on {', '.join(valid)}{sample}{apart}"]


def _length(config: TrainConfig) -> str:
    sequences = config.steps * config.global_batch_size
    given = next((f" ({n} {getattr(config, n):g})" for n in ("tokens", "epochs") if getattr(config, n) is not None), "")
    return (
        f"{config.steps:,} steps{given} of {config.global_batch_size} sequences of {config.data.seq_length}: "
        f"{sequences * config.data.seq_length:,} tokens"
    )


def _layout(config: TrainConfig) -> str:
    layout, ranks = config.layout, world_size()
    axes = {**dataclasses.asdict(layout), "dp": layout.dp(ranks)}
    microbatches = config.global_batch_size // (config.micro_batch_size * layout.dp(ranks))
    fp8 = f" with fp8 {config.fp8.format}" if config.fp8.format else ""
    return (
        f"{ranks} ranks: {', '.join(f'{axis} {size}' for axis, size in axes.items() if size)}; {microbatches} "
        f"micro-batches of {config.micro_batch_size} a step and rank; {config.precision}{fp8}, "
        f"recompute {config.recompute}"
    )


def _schedule(config: TrainConfig) -> str:
    optim = config.optim
    router = f", routers {optim.router_lr:g}" if optim.router_lr is not None else ""
    on_host = f", {optim.offload:.0%} of it on the host" if optim.offload else ""
    return (
        f"lr {optim.lr:g} -> {optim.min_lr:g}{router}, {optim.decay}, warm-up {optim.warmup_steps} "
        f"{optim.schedule_unit}; AdamW ({optim.beta1:g}, {optim.beta2:g}){on_host}, weight decay "
        f"{optim.weight_decay:g}, clip {optim.clip_grad:g}"
        + (f"; averages of the weights, decay {config.ema.decay:g}" if config.ema.decay else "")
    )
