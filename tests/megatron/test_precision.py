"""Settings of precision, experts and dispatcher in Megatron's own configurations, field by field, without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from btx_nemo.config.precision import Fp8Config, LossScaleConfig
from btx_nemo.config.schema import (
    DataConfig,
    DropoutConfig,
    LayoutConfig,
    MoEOverride,
    OptimConfig,
    TrainConfig,
)
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.megatron.precision import Device, grouped_experts, optimizer_settings, transformer_settings
from btx_nemo.megatron.preflight import RECIPES, check_precision

SIZES = dict(hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2, head_dim=16)
DENSE = ModelConfig(num_layers=4, vocab_size=64, max_position_embeddings=64, **SIZES)
MIXTURE = dataclasses.replace(DENSE, moe=MoEConfig(num_experts=4, top_k=2))
CPU = Device(None)
HOPPER = Device((9, 0), (12, 9), "2.8.0", True)
BLACKWELL = Device((10, 0), (13, 0), "2.8.0", True)


def config(**changes: Any) -> TrainConfig:
    """A run in bf16 with these settings."""
    settings: dict[str, Any] = dict(
        stage="mix",
        out="unused",
        data=DataConfig(path="unused", seq_length=32),
        steps=10,
        micro_batch_size=1,
        global_batch_size=2,
        precision="bf16",
        optim=OptimConfig(lr=1e-3),
    )
    return TrainConfig(**{**settings, **changes})


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron believes in Transformer Engine 2.8 when it checks a configuration. It is not used: none is here."""
    from megatron.core import utils
    from packaging.version import Version

    monkeypatch.setattr(utils, "_te_version", Version("2.8.0"))
    yield


def built(settings: TrainConfig, model: ModelConfig, device: Device) -> dict[str, Any]:
    """Every field of Megatron's TransformerConfig, after its own checks."""
    from btx_nemo.megatron.model import transformer_config

    found = transformer_config(
        model,
        settings.layout,
        precision=settings.precision,
        settings=transformer_settings(settings, model, device),
    )
    return {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}


def changed(settings: TrainConfig, model: ModelConfig, device: Device) -> dict[str, Any]:
    """Fields that differ from those of a bf16 run with nothing set, on the CPU."""
    plain, found = built(config(), model, CPU), built(settings, model, device)
    assert plain.keys() == found.keys()
    unlike = {key for key in found if found[key] != plain[key] and not callable(found[key])}
    return {key: found[key] for key in unlike}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_fp8_sets_these_fields_and_no_other(
    transformer_engine: None, recipe: str, model: ModelConfig, form: str
) -> None:
    ends = recipe != "delayed"
    fp8 = Fp8Config(
        format=form,
        recipe=recipe,
        amax_history_len=16,
        amax_compute="max",
        margin=2,
        wgrad=False,
        first_last_bf16=ends,
        first_bf16=2,
        last_bf16=3,
    )
    found = changed(config(fp8=fp8), model, CPU)
    expected = {
        "fp8": form,
        "fp8_recipe": recipe,
        "fp8_margin": 2,
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
        "fp8_wgrad": False,
        "first_last_layers_bf16": ends,
        "num_layers_at_start_in_bf16": 2,
        "num_layers_at_end_in_bf16": 3,
    }
    plain = built(config(), model, CPU)
    assert found == {key: value for key, value in expected.items() if value != plain[key]}
    assert not built(config(fp8=fp8), model, CPU)["fp8_param"]
    assert optimizer_settings(config(fp8=fp8))["fp8_recipe"] == recipe


def test_the_defaults_of_fp8_are_te_s(transformer_engine: None) -> None:
    found = changed(config(fp8=Fp8Config(format="hybrid", pad_routing=True)), MIXTURE, CPU)
    assert found == {
        "fp8": "hybrid",
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "moe_router_padding_for_quantization": True,
    }
    assert built(config(), MIXTURE, CPU)["moe_router_dtype"] == "fp32"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_dtypes(precision: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    found = built(config(precision=precision), MIXTURE, CPU)
    assert (found["fp16"], found["bf16"]) == (precision == "fp16", precision == "bf16")
    assert found["params_dtype"] == found["pipeline_dtype"] == dtype
    assert found["moe_router_dtype"] == "fp32"


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_dispatcher_and_grouped_experts(dispatcher: str) -> None:
    moe = MoEOverride(dispatcher=dispatcher)
    found = changed(config(moe=moe), MIXTURE, HOPPER)
    expected = {"moe_grouped_gemm": True, "moe_token_dispatcher_type": dispatcher}
    assert found == {key: value for key, value in expected.items() if value != "alltoall"}
    assert built(config(moe=moe), MIXTURE, HOPPER)["moe_flex_dispatcher_backend"] == "deepep"
    assert changed(config(moe=MoEOverride(experts="sequential")), MIXTURE, HOPPER) == {}


def optimizer(settings: TrainConfig) -> dict[str, Any]:
    """Every field of Megatron's OptimizerConfig, after its own checks."""
    from megatron.core.optimizer import OptimizerConfig

    found = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, **optimizer_settings(settings))
    return {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"precision": "fp32"}, {"bf16": False, "params_dtype": torch.float32}),
        (
            {"precision": "fp16", "loss_scale": LossScaleConfig(initial=4096.0, min=2.0, window=7, hysteresis=3)},
            {
                "bf16": False,
                "fp16": True,
                "params_dtype": torch.float16,
                "initial_loss_scale": 4096.0,
                "min_loss_scale": 2.0,
                "loss_scale_window": 7,
                "hysteresis": 3,
            },
        ),
        ({"fp8": Fp8Config(format="e4m3", recipe="mxfp8")}, {"fp8_recipe": "mxfp8"}),
    ],
    ids=["fp32", "fp16", "mxfp8"],
)
def test_the_optimizer_s_fields(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    plain, found = optimizer(config()), optimizer(config(**changes))
    assert {key: value for key, value in found.items() if value != plain[key]} == expected


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, HOPPER, True),
        ({}, CPU, False),
        ({}, dataclasses.replace(HOPPER, transformer_engine=None), False),
        ({}, dataclasses.replace(HOPPER, transformer_engine="1.8.0"), False),
        ({"dropout": DropoutConfig(expert=0.1)}, HOPPER, False),
        ({"freeze": ["*.mlp.experts.*"]}, HOPPER, True),
        ({"freeze": ["*.local_experts.0.*"]}, HOPPER, False),
        ({"freeze": ["*.linear_fc1.weight"]}, HOPPER, True),
        ({"train": ["*.router.*"]}, HOPPER, True),
        ({"train": ["decoder.layers.2.mlp.experts.local_experts.[12].*"]}, HOPPER, False),
        ({"moe": MoEOverride(experts="sequential")}, HOPPER, False),
    ],
)
def test_experts_are_grouped_where_nothing_speaks_against_it(
    changes: dict[str, Any], device: Device, expected: bool
) -> None:
    settings = config(**changes)
    assert grouped_experts(settings, MIXTURE, device) is expected
    if not expected and settings.moe.experts == "auto":
        with pytest.raises(UserError, match=r"moe.experts=grouped: .*; give moe.experts=auto"):
            check_precision(dataclasses.replace(settings, moe=MoEOverride(experts="grouped")), MIXTURE, device)


def test_every_recipe_runs_where_it_can(transformer_engine: None) -> None:
    """What the preflight lets through, Megatron's own checks let through as well."""
    devices = [Device(c, (12, 9), "2.8.0") for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
    runs: dict[str, list[tuple[int, int]]] = {}
    for (recipe, device), model in itertools.product(itertools.product(RECIPES, devices), (DENSE, MIXTURE)):
        settings = config(fp8=Fp8Config(format="hybrid", recipe=recipe, first_last_bf16=recipe != "delayed"))
        try:
            check_precision(settings, model, device)
        except UserError:
            continue
        built(settings, model, device)
        if model is DENSE:
            runs.setdefault(recipe, []).append(device.capability)  # type: ignore[arg-type]
    assert runs == {
        "delayed": [(8, 9), (9, 0), (10, 0), (12, 0)],
        "tensorwise": [(8, 9), (9, 0), (10, 0), (12, 0)],
        "blockwise": [(9, 0), (10, 0), (12, 0)],
        "mxfp8": [(10, 0)],
    }


FP8 = {"format": "hybrid"}
REFUSED = [
    # what the device cannot do
    ({"fp8": FP8}, CPU, "fp8.format=hybrid: needs a GPU, this is the CPU; give fp8.format=null"),
    ({"fp8": FP8}, Device((8, 0)), "fp8.recipe=delayed: needs compute capability 8.9 or higher, this is a GPU of"),
    ({"fp8": FP8 | {"recipe": "mxfp8"}}, HOPPER, "fp8.recipe=mxfp8: needs compute capability 10.0 and below 12.0"),
    ({"fp8": FP8 | {"recipe": "mxfp8"}}, HOPPER, "give fp8.recipe=blockwise"),
    ({"fp8": FP8 | {"recipe": "blockwise"}}, Device((8, 9), (12, 9), "2.8"), "give fp8.recipe=tensorwise"),
    ({"fp8": FP8}, Device((9, 0)), "fp8.recipe=delayed: needs Transformer Engine; pip install 'btx-nemo[gpu]'"),
    ({"fp8": FP8 | {"recipe": "blockwise"}}, Device((9, 0), (12, 9), "2.2.0"), "needs Transformer Engine 2.3 or newer"),
    ({"fp8": FP8 | {"recipe": "blockwise"}}, Device((9, 0), (12, 8), "2.8.0"), "needs CUDA 12.9 or newer"),
    ({"moe": {"dispatcher": "flex"}}, CPU, "moe.dispatcher=flex: needs DeepEP and GPUs"),
    ({"moe": {"dispatcher": "flex"}}, Device((9, 0)), "moe.dispatcher=flex: needs DeepEP and GPUs"),
    ({"moe": {"experts": "grouped"}}, CPU, "moe.experts=grouped: grouped layers are Transformer Engine's"),
    # what is known to break
    ({"fp8": FP8 | {"recipe": "blockwise"}, "layout": {"tp": 2}}, HOPPER, "Megatron-LM issue 1863"),
    ({"fp8": FP8 | {"first_last_bf16": True}}, HOPPER, "fp8.first_last_bf16: not with fp8.recipe=delayed"),
    ({"fp8": FP8 | {"pad_routing": True}, "moe": {"dispatcher": "allgather"}}, HOPPER, "does not pad for"),
    ({"fp8": FP8 | {"pad_routing": True}, "dropout": {"expert": 0.1}}, HOPPER, "fp8.pad_routing: adds tokens"),
    ({"moe": {"dispatcher": "flex"}}, HOPPER, "needs layout.ep x layout.etp above 1"),
    ({"moe": {"dispatcher": "allgather"}, "dropout": {"expert": 0.1}}, CPU, "dropout.expert follows the order of"),
    # what does not go together, and values out of range
    ({"fp8": FP8, "precision": "fp16"}, HOPPER, "is for precision=bf16, not fp16; give precision=bf16"),
    ({"fp8": {"format": "e5m2"}}, HOPPER, "fp8.format=e5m2: unknown; known: e4m3, hybrid"),
    ({"fp8": FP8 | {"recipe": "rowwise"}}, HOPPER, "fp8.recipe=rowwise: unknown; known: delayed, tensorwise"),
    ({"fp8": FP8 | {"amax_compute": "mean"}}, HOPPER, "fp8.amax_compute=mean: unknown; known: max, most_recent"),
    ({"fp8": FP8 | {"amax_history_len": 0}}, HOPPER, "amax_history_len=0 must be 1 or more"),
    (
        {"fp8": FP8 | {"recipe": "tensorwise", "first_last_bf16": True, "last_bf16": 3}, "layout": {"pp": 2}},
        HOPPER,
        "fp8.last_bf16=3: must lie between 0 and the 2 layers of a pipeline stage",
    ),
    ({"fp8": {"pad_routing": True}}, HOPPER, "fp8: settings without fp8.format"),
    ({"fp8": {"recipe": "mxfp8"}}, HOPPER, "fp8: settings without fp8.format"),
    ({"fp8": FP8 | {"recipe": "tensorwise", "margin": 1}}, HOPPER, "fp8.margin=1: does nothing without fp8.recipe=del"),
    ({"fp8": FP8 | {"recipe": "blockwise", "wgrad": False}}, HOPPER, "fp8.wgrad=False: does nothing without fp8.reci"),
    ({"fp8": FP8 | {"last_bf16": 2}}, HOPPER, "fp8.last_bf16=2: does nothing without fp8.first_last_bf16=true"),
    ({"loss_scale": {"window": 7}}, HOPPER, "loss_scale: is for precision=fp16, not bf16"),
    ({"precision": "fp8"}, HOPPER, "precision=fp8: unknown; known: fp32, bf16, fp16"),
    ({"moe": {"dispatcher": "ring"}}, HOPPER, "moe.dispatcher=ring: unknown; known: alltoall, allgather, flex"),
    ({"moe": {"experts": "te"}}, HOPPER, "moe.experts=te: unknown; known: auto, sequential, grouped"),
    (
        {"loss_scale": {"initial": 0.5}, "precision": "fp16"},
        HOPPER,
        "loss_scale: initial=0.5 must not be below min=1.0",
    ),
    ({"loss_scale": {"window": 0}, "precision": "fp16"}, HOPPER, "loss_scale.window=0: must be 1 or more"),
    # sizes
    ({"fp8": FP8, "layout": {"tp": 8}}, HOPPER, "num_attention_heads x head_dim=64 over 8 ranks is no multiple of 16"),
    ({"fp8": FP8, "layout": {"cp": 4}}, HOPPER, "data.seq_length x micro_batch_size=32 over 4 ranks"),
    ({"fp8": FP8, "layout": {"etp": 4}}, HOPPER, "ffn_hidden_size=96 over 4 ranks is no multiple of 16"),
    ({"fp8": FP8, "data": {"seq_length": 24}}, HOPPER, "data.seq_length x micro_batch_size=24 is no multiple of 16"),
    ({"fp8": FP8 | {"recipe": "mxfp8"}, "data": {"seq_length": 48}}, BLACKWELL, "=48 is no multiple of 32"),
]
SECTIONS = {
    "fp8": Fp8Config,
    "moe": MoEOverride,
    "layout": LayoutConfig,
    "dropout": DropoutConfig,
    "loss_scale": LossScaleConfig,
}


@pytest.mark.parametrize(("changes", "device", "message"), REFUSED)
def test_what_cannot_be_is_told_in_one_line(changes: dict[str, Any], device: Device, message: str) -> None:
    made = {key: SECTIONS[key](**value) for key, value in changes.items() if key in SECTIONS}
    if "data" in changes:
        made["data"] = DataConfig(path="unused", **changes["data"])
    if "precision" in changes:
        made["precision"] = changes["precision"]
    with pytest.raises(UserError) as told:
        check_precision(config(**made), MIXTURE, device)
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_flex_refuses_routers_that_send_a_token_to_any_number_of_experts() -> None:
    settings = config(moe=MoEOverride(dispatcher="flex"), layout=LayoutConfig(ep=2))
    check_precision(settings, MIXTURE, HOPPER)
    switch = dataclasses.replace(MIXTURE, moe=MoEConfig(num_experts=4, router="switch", top_k=1))
    with pytest.raises(UserError, match=r"a fixed number of experts, which moe.router=switch does not"):
        check_precision(settings, switch, HOPPER)
