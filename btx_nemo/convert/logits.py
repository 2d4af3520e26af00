"""Logits of any checkpoint we know, for comparing: Megatron's for ours, transformers' for Hugging Face folders."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.source import Source


def megatron_logits(model: Path | Source, tokens_BS: Tensor, layout: LayoutConfig | None = None) -> Tensor | None:
    """fp32 logits [B, S, V] of a folder that `open_source` knows, or of one opened, computed by Megatron-Core in fp32.

    Routers that draw at inference take the most likely expert instead (`settled`).
    Collective over the ranks of `layout`; None on ranks that are not of the last pipeline stage.
    """
    from btx_nemo.megatron.load import load_weights
    from btx_nemo.megatron.model import build_model
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.source import model_source, open_source

    layout = layout or LayoutConfig()
    source = model_source(model) if isinstance(model, Source) else open_source(model)
    with parallel_state(layout, seed=0):
        # Megatron's own layers everywhere: Transformer Engine may multiply fp32 in a coarser format.
        gpt = build_model(settled(source.model), layout, transformer_engine=False)
        load_weights(gpt, source.expressions, source.readers, seed=0)
        logits = model_logits(gpt, tokens_BS)
        return None if logits is None else logits[..., : source.model.vocab_size]


def settled(model: ModelConfig) -> ModelConfig:
    """The model with nothing left to chance, so that logits can be compared: inference=hard becomes argmax."""
    if model.moe is None or model.moe.options.get("inference") != "hard":
        return model
    return replace(model, moe=replace(model.moe, options={**model.moe.options, "inference": "argmax"}))


@torch.no_grad()
def model_logits(gpt: torch.nn.Module, tokens_BS: Tensor) -> Tensor | None:
    """fp32 logits [B, S, V], on the CPU, of a live model of Megatron's, which is put in evaluation mode.

    Collective over its ranks; None on those that are not of the last pipeline stage.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
    from megatron.core.utils import get_attr_wrapped_model

    from btx_nemo.megatron.model import chunks
    from btx_nemo.megatron.parallel import context_parallel_part
    from btx_nemo.megatron.platform import device

    positions = torch.arange(tokens_BS.shape[1])[None].expand_as(tokens_BS)
    batch = context_parallel_part({"tokens": tokens_BS.to(device()), "positions": positions.to(device())})
    outputs: list[Tensor] = []

    def forward_step(_: object, model: torch.nn.Module):
        logits = model(batch["tokens"], batch["positions"], None)
        if get_attr_wrapped_model(model, "post_process"):
            outputs.append(_whole_sequences(gather_from_tensor_model_parallel_region(logits)).float().cpu())
        return logits, lambda _: (torch.zeros((), device=device()), {})

    stages = [stage.eval() for stage in chunks(gpt)]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(stages),
        model=stages,
        # The interleaved schedule takes no fewer: the same once more for each stage.
        num_microbatches=mpu.get_pipeline_model_parallel_world_size() if len(stages) > 1 else 1,
        seq_length=tokens_BS.shape[1],
        micro_batch_size=tokens_BS.shape[0],
        forward_only=True,
    )
    return outputs[0] if outputs else None


def _whole_sequences(logits_BQV: Tensor) -> Tensor:
    """[B, S, V] from what each context-parallel rank has. Collective over them."""
    from megatron.core import parallel_state as mpu

    from btx_nemo.routers.ranks import Places

    group, sequences = mpu.get_context_parallel_group(), len(logits_BQV)
    places = Places(group, group.size())
    whole_TV, _ = places.gather_tokens(logits_BQV.transpose(0, 1).flatten(0, 1), sequences)
    return whole_TV.unflatten(0, (-1, sequences)).transpose(0, 1)


def hf_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    """fp32 logits [B, S, V] of a Hugging Face folder, `settled`, computed by transformers in fp32."""
    from btx_nemo.megatron.platform import device

    model = load_hf(folder)
    with torch.no_grad():
        return model.to(device())(tokens_BS.to(device())).logits.float().cpu()


def load_hf(folder: Path) -> Any:
    """A Hugging Face folder as a transformers model, fp32, in evaluation mode, `settled`. Raises UserError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from btx_nemo.convert.hf_moe import register_auto_classes

    register_auto_classes()  # so that no code of the folder's own is ever asked for
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            options = getattr(config, "router_options", None) or {}
            if options.get("inference") == "hard":
                config.router_options = {**options, "inference": "argmax"}
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True
            )
            return model.eval()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: transformers cannot load it: {error}") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars of transformers' own where nobody watches them."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
