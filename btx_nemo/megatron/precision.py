"""Precision, expert layers and dispatchers: what Megatron's configurations say for them, and on which device.

docs/precision.md lists every setting with its field; `preflight.py` says what cannot be.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from btx_nemo.config.schema import TrainConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.platform import capability, cuda_version

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROUPED_GEMM = "1.9"
"""First Transformer Engine with grouped layers that Megatron saves under the sequential ones' names."""


@dataclass(frozen=True)
class Device:
    """What a run would compute on."""

    capability: tuple[int, int] | None
    """Compute capability of the GPU; None for the CPU."""
    cuda: tuple[int, int] | None = None
    """CUDA that torch was built for."""
    transformer_engine: str | None = None
    """Version of Transformer Engine; None where it is absent or cannot be imported."""
    deep_ep: bool = False
    """Whether DeepEP is installed."""

    @classmethod
    def here(cls) -> Device:
        """This process's."""
        if capability() is None:
            return cls(None)
        deep_ep = importlib.util.find_spec("deep_ep") is not None
        return cls(capability(), numbers(cuda_version() or "0.0"), _transformer_engine(), deep_ep)

    @property
    def name(self) -> str:
        """In words."""
        return "the CPU" if self.capability is None else f"a GPU of compute capability {dotted(self.capability)}"


def transformer_settings(config: TrainConfig, model: ModelConfig, device: Device) -> dict[str, Any]:
    """Keywords of Megatron's TransformerConfig for FP8, the experts' layers and their dispatcher."""
    settings: dict[str, Any] = {}
    fp8 = config.fp8
    if fp8.format is not None:
        settings |= dict(
            fp8=fp8.format,
            fp8_recipe=fp8.recipe,
            fp8_margin=fp8.margin,
            fp8_amax_history_len=fp8.amax_history_len,
            fp8_amax_compute_algo=fp8.amax_compute,
            fp8_wgrad=fp8.wgrad,
            first_last_layers_bf16=fp8.first_last_bf16,
            num_layers_at_start_in_bf16=fp8.first_bf16,
            num_layers_at_end_in_bf16=fp8.last_bf16,
        )
    if model.moe is not None:
        settings |= dict(
            moe_token_dispatcher_type=config.moe.dispatcher,
            moe_grouped_gemm=grouped_experts(config, model, device),
            moe_router_padding_for_quantization=fp8.format is not None and fp8.pad_routing,
        )
    return settings


def optimizer_settings(config: TrainConfig) -> dict[str, Any]:
    """Keywords of Megatron's OptimizerConfig: dtypes, loss scale, FP8."""
    scale = config.loss_scale
    settings: dict[str, Any] = dict(
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        params_dtype=DTYPES[config.precision],
        fp8_recipe=config.fp8.recipe if config.fp8.format is not None else None,
    )
    if config.precision == "fp16":
        settings |= dict(
            initial_loss_scale=scale.initial,
            min_loss_scale=scale.min,
            loss_scale_window=scale.window,
            hysteresis=scale.hysteresis,
        )
    return settings


def grouped_experts(config: TrainConfig, model: ModelConfig, device: Device) -> bool:
    """Whether a layer's experts are computed by one grouped matrix product, which only Transformer Engine has."""
    if config.moe.experts == "auto":
        return why_not_grouped(config, model, device) is None
    return config.moe.experts == "grouped"


def why_not_grouped(config: TrainConfig, model: ModelConfig, device: Device) -> str | None:
    """What speaks against grouped expert layers; None where nothing does."""
    if device.capability is None:
        return "grouped layers are Transformer Engine's and need a GPU"
    if device.transformer_engine is None or older(device.transformer_engine, GROUPED_GEMM):
        return f"grouped layers need Transformer Engine {GROUPED_GEMM} or newer, found {device.transformer_engine}"
    if config.dropout.expert:
        return f"dropout.expert={config.dropout.expert} needs each expert by itself"
    if frozen_in_part(config, model):
        return "freeze or train names some experts of a layer, and a grouped layer trains all or none"
    return None


def frozen_in_part(config: TrainConfig, model: ModelConfig) -> bool:
    """Whether some of a layer's expert weights train and others, of the same kind, do not."""
    assert model.moe is not None
    for layer in filter(model.is_mixture, range(model.num_layers)):
        for linear in ("linear_fc1", "linear_fc2"):
            trained = {
                config.trains(f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{linear}.weight")
                for expert in range(model.moe.num_experts)
            }
            if len(trained) == 2:
                return True
    return False


def _transformer_engine() -> str | None:
    from megatron.core.extensions import transformer_engine

    if not getattr(transformer_engine, "HAVE_TE", False):
        return None
    for name in ("transformer-engine", "transformer_engine"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def older(version: str, than: str) -> bool:
    """Whether a version is below another, by its first two numbers."""
    return numbers(version) < numbers(than)


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = (version.split("+")[0].split(".") + ["0"])[:2]
    return int(major), int(minor)


def dotted(version: tuple[int, int]) -> str:
    """A version as it is written."""
    return ".".join(map(str, version))
