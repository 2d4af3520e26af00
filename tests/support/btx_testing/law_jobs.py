"""Megatron's own checkpoint reader and writer on live models, run on gloo ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist

from btx_nemo.config.schema import LayoutConfig


def megatron_loads(folder: str, layout: dict[str, int], tokens: torch.Tensor) -> torch.Tensor | None:
    """fp32 logits of a live GPTModel that Megatron's dist_checkpointing.load has filled from a checkpoint folder.

    Every parameter is NaN before, so that whatever is not loaded shows.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from btx_nemo.convert.logits import model_logits
    from btx_nemo.families.source import read_model_json
    from btx_nemo.megatron.load import METADATA, sharded_tensors
    from btx_nemo.megatron.model import build_model
    from btx_nemo.megatron.parallel import parallel_state

    config = LayoutConfig(**layout)
    with parallel_state(config, seed=0):
        gpt = build_model(read_model_json(Path(folder)), config)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.fill_(float("nan"))
        spelling = {**METADATA, **(dist_checkpointing.load_content_metadata(folder) or {})}
        state, missing, unexpected = dist_checkpointing.load(
            gpt.sharded_state_dict(metadata=spelling), folder, strict=StrictHandling.RETURN_ALL
        )
        # A model asks for Transformer Engine's FP8 state too, which weights that were converted do not have.
        beyond = [key for key in (*missing, *unexpected) if not key.endswith("._extra_state")]
        assert not beyond, f"the checkpoint and the model differ in {beyond}"
        state.pop("content_metadata", None)
        gpt.load_state_dict(state)
        list(sharded_tensors(gpt))
        assert "dp_cp_group" not in METADATA, "the next layout in this process would be given this one's group"
        return model_logits(gpt, tokens)


def megatron_saves(
    source: str, out: str, layout: dict[str, int], precision: str, metadata: dict[str, bool] | None = None
) -> None:
    """Builds a live GPTModel from any model folder and saves it by Megatron's dist_checkpointing.save.

    `metadata` replaces ours, which says how keys are spelled.
    """
    from megatron.core import dist_checkpointing

    from btx_nemo.checkpoints.manifest import write_manifest
    from btx_nemo.families.source import save_model_config
    from btx_nemo.megatron.load import METADATA, load_weights
    from btx_nemo.megatron.model import build_model
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.source import open_source

    # Megatron's writer starts processes, which a daemon, as the pool's ranks are, may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    config, model = LayoutConfig(**layout), open_source(Path(source))
    with parallel_state(config, seed=0):
        gpt = build_model(model.model, config, precision=precision)
        load_weights(gpt, model.expressions, model.readers, seed=0)
        if dist.get_rank() == 0:
            Path(out).mkdir()
        dist.barrier()
        spelling = {**METADATA, **(metadata or {})}
        dist_checkpointing.save(gpt.sharded_state_dict(metadata=dict(spelling)), out, content_metadata=spelling)
        dist.barrier()
        if dist.get_rank() == 0:
            save_model_config(model.model, Path(out))
            write_manifest(Path(out), kind="checkpoint", extra={"step": 0})
        dist.barrier()


def half_logits(source: str, layout: dict[str, int], tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits of any model folder that Megatron computes in bf16, as a training in bf16 does."""
    from megatron.core.transformer.module import Float16Module

    from btx_nemo.convert.logits import model_logits
    from btx_nemo.megatron.load import load_weights
    from btx_nemo.megatron.model import build_model
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.source import open_source

    config, model = LayoutConfig(**layout), open_source(Path(source))
    with parallel_state(config, seed=0):
        gpt = build_model(model.model, config, precision="bf16")
        load_weights(gpt, model.expressions, model.readers, seed=0)
        logits = model_logits(Float16Module(gpt.config, gpt), tokens)
        return None if logits is None else logits[..., : model.model.vocab_size]
