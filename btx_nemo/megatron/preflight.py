"""What precision, expert layers and dispatchers cannot do, told in one line before anything is allocated.

Refused is what the device and its libraries cannot run (`Device` is an argument, so that a machine without a GPU can
ask for another), what Megatron forbids, and what is known to break.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from btx_nemo.config.choice import check_choice
from btx_nemo.config.precision import Fp8Config, LossScaleConfig
from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import dense_width
from btx_nemo.megatron.precision import DTYPES, Device, dotted, older, why_not_grouped
from btx_nemo.routers import router_class

FP8_FORMATS = ("e4m3", "hybrid")
DISPATCHERS = ("alltoall", "allgather", "flex")
EXPERTS = ("auto", "sequential", "grouped")


@dataclass(frozen=True)
class _Recipe:
    """What an FP8 recipe needs."""

    transformer_engine: str
    """First version of Transformer Engine that Megatron takes it from."""
    first: tuple[int, int]
    """Lowest compute capability."""
    before: tuple[int, int] = (99, 0)
    """The capability from which it does not work."""
    cuda: tuple[int, int] = (0, 0)
    """First CUDA."""
    multiple: int = 16
    """Sizes of matrix products must be multiples of this."""


RECIPES = {
    "delayed": _Recipe("1.7", (8, 9)),
    "tensorwise": _Recipe("2.2", (8, 9)),
    "blockwise": _Recipe("2.3", (9, 0), cuda=(12, 9)),
    "mxfp8": _Recipe("2.1", (10, 0), before=(12, 0), multiple=32),
}
_DELAYED = ("amax_history_len", "amax_compute", "margin", "wgrad")
"""What Transformer Engine is told with recipe=delayed alone."""


def check_precision(config: TrainConfig, model: ModelConfig, device: Device) -> None:
    """Raises UserError for a precision, an expert layer or a dispatcher that cannot be or is known to fail.

    Nothing is allocated. One line each: where, what, remedy.
    """
    check_choice("precision", config.precision, DTYPES)
    check_choice("moe.dispatcher", config.moe.dispatcher, DISPATCHERS)
    check_choice("moe.experts", config.moe.experts, EXPERTS)
    _check_loss_scale(config.loss_scale, config.precision)
    if model.moe is not None:
        _check_experts(config, model, device)
    if config.fp8.format is not None:
        _check_fp8(config.fp8, config, model)
        _check_fp8_device(config.fp8, config, model, device)
        _check_fp8_sizes(config, model)
    elif config.fp8 != Fp8Config():
        raise UserError("fp8: settings without fp8.format; give fp8.format=hybrid, or leave them")


def _check_loss_scale(scale: LossScaleConfig, precision: str) -> None:
    if precision != "fp16" and scale != LossScaleConfig():
        raise UserError(f"loss_scale: is for precision=fp16, not {precision}; leave it, or give precision=fp16")
    if not 0 < scale.min <= scale.initial < float("inf"):
        raise UserError(f"loss_scale: initial={scale.initial} must not be below min={scale.min}, and both positive")
    for name in ("window", "hysteresis"):
        if getattr(scale, name) < 1:
            raise UserError(f"loss_scale.{name}={getattr(scale, name)}: must be 1 or more")


def _check_experts(config: TrainConfig, model: ModelConfig, device: Device) -> None:
    assert model.moe is not None
    if config.moe.experts == "grouped":
        reason = why_not_grouped(config, model, device)
        if reason is not None:
            raise UserError(f"moe.experts=grouped: {reason}; give moe.experts=auto")
    if config.moe.dispatcher == "alltoall":
        return
    where = f"moe.dispatcher={config.moe.dispatcher}"
    if config.dropout.expert:
        raise UserError(f"{where}: dropout.expert follows the order of alltoall; give moe.dispatcher=alltoall")
    if config.moe.dispatcher == "allgather":
        if config.fp8.pad_routing:
            raise UserError(f"{where}: does not pad for fp8.pad_routing; give moe.dispatcher=alltoall")
        return
    if device.capability is None or not device.deep_ep:
        raise UserError(f"{where}: needs DeepEP and GPUs, which are not here; give moe.dispatcher=alltoall")
    if config.layout.ep * config.layout.etp == 1:
        raise UserError(f"{where}: needs layout.ep x layout.etp above 1; give moe.dispatcher=alltoall")
    if router_class(model.moe.router).variable_selection:
        raise UserError(
            f"{where}: sends a token to a fixed number of experts, which moe.router={model.moe.router} does not; "
            "give moe.dispatcher=alltoall"
        )


def _check_fp8(fp8: Fp8Config, config: TrainConfig, model: ModelConfig) -> None:
    """Settings that cannot go together, on any device."""
    check_choice("fp8.format", str(fp8.format), FP8_FORMATS)
    check_choice("fp8.recipe", fp8.recipe, RECIPES)
    check_choice("fp8.amax_compute", fp8.amax_compute, ("max", "most_recent"))
    if config.precision != "bf16":
        raise UserError(f"fp8.format={fp8.format}: is for precision=bf16, not {config.precision}; give precision=bf16")
    if fp8.amax_history_len < 1 or fp8.margin < 0:
        raise UserError(
            f"fp8: amax_history_len={fp8.amax_history_len} must be 1 or more, margin={fp8.margin} not negative"
        )
    if fp8.first_last_bf16 and fp8.recipe == "delayed":
        raise UserError(
            "fp8.first_last_bf16: not with fp8.recipe=delayed, whose scales Megatron reduces for all layers at once; "
            "give another recipe"
        )
    idle = () if fp8.first_last_bf16 else ("first_bf16", "last_bf16")
    _check_idle(fp8, idle, "fp8.first_last_bf16=true")
    _check_idle(fp8, () if fp8.recipe == "delayed" else _DELAYED, "fp8.recipe=delayed")
    per_stage = model.num_layers // config.layout.pp
    for name in ("first_bf16", "last_bf16"):
        if fp8.first_last_bf16 and not 0 <= getattr(fp8, name) <= per_stage:
            raise UserError(
                f"fp8.{name}={getattr(fp8, name)}: must lie between 0 and the {per_stage} layers of a pipeline stage"
            )
    if fp8.pad_routing and config.dropout.expert:
        raise UserError("fp8.pad_routing: adds tokens that dropout.expert does not know; leave one of them")


def _check_idle(fp8: Fp8Config, names: Sequence[str], needs: str) -> None:
    """Settings that would do nothing without another one are left as they are."""
    for name in names:
        if getattr(fp8, name) != getattr(Fp8Config(), name):
            raise UserError(f"fp8.{name}={getattr(fp8, name)}: does nothing without {needs}; give it, or leave {name}")


def _check_fp8_device(fp8: Fp8Config, config: TrainConfig, model: ModelConfig, device: Device) -> None:
    needs, where = RECIPES[fp8.recipe], f"fp8.recipe={fp8.recipe}"
    if device.capability is None:
        raise UserError(f"fp8.format={fp8.format}: needs a GPU, this is the CPU; give fp8.format=null")
    if not needs.first <= device.capability < needs.before:
        works = [name for name, other in RECIPES.items() if other.first <= device.capability < other.before]
        raise UserError(
            f"{where}: needs compute capability {dotted(needs.first)}"
            + (f" and below {dotted(needs.before)}" if needs.before < (99, 0) else " or higher")
            + f", this is {device.name}; "
            + (f"give fp8.recipe={works[-1]}" if works else "give fp8.format=null")
        )
    if device.transformer_engine is None:
        raise UserError(f"{where}: needs Transformer Engine; pip install 'btx-nemo[gpu]', or give fp8.format=null")
    if older(device.transformer_engine, needs.transformer_engine):
        raise UserError(
            f"{where}: needs Transformer Engine {needs.transformer_engine} or newer, found "
            f"{device.transformer_engine}; upgrade it, or give fp8.recipe=delayed"
        )
    if (device.cuda or (0, 0)) < needs.cuda:
        raise UserError(
            f"{where}: needs CUDA {dotted(needs.cuda)} or newer, torch has {dotted(device.cuda or (0, 0))}; "
            "give fp8.recipe=tensorwise"
        )
    crashes = fp8.recipe == "blockwise" and device.capability[0] == 9 and config.moe.dispatcher == "alltoall"
    if crashes and model.moe is not None and config.layout.tp > 1:
        raise UserError(
            f"{where}: on Hopper with layout.tp={config.layout.tp} and moe.dispatcher=alltoall it crashes "
            "(Megatron-LM issue 1863); give layout.tp=1 or fp8.recipe=tensorwise"
        )


def _check_fp8_sizes(config: TrainConfig, model: ModelConfig) -> None:
    multiple = RECIPES[config.fp8.recipe].multiple
    for what, size, parts in _product_sizes(config, model):
        if size % parts or (size // parts) % multiple:
            raise UserError(
                f"fp8.recipe={config.fp8.recipe}: {what}={size}"
                + (f" over {parts} ranks" if parts > 1 else "")
                + f" is no multiple of {multiple}, as FP8 matrix products need; give fp8.format=null, or other sizes"
            )


def _product_sizes(config: TrainConfig, model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(name, size, ranks that share it) of each side of Transformer Engine's matrix products.

    Experts pad the tokens that they get by themselves.
    """
    tp, cp, etp = config.layout.tp, config.layout.cp, config.layout.etp
    heads, groups = model.num_attention_heads, model.num_query_groups
    yield "hidden_size", model.hidden_size, 1
    yield "num_attention_heads x head_dim", heads * model.head_dim, tp
    yield "rows of q, k and v", (heads + 2 * groups) * model.head_dim, tp
    if model.moe is None or not all(map(model.is_mixture, range(model.num_layers))):
        yield "ffn_hidden_size", dense_width(model), tp
    if model.moe is not None:
        yield "ffn_hidden_size", model.ffn_hidden_size, etp
        yield "shared_expert_intermediate_size", model.moe.shared_expert_intermediate_size or 0, tp
    yield "data.seq_length x micro_batch_size", config.data.seq_length * config.micro_batch_size, cp
