"""Which parameters a run trains: `freeze` and `train` on the model that was built."""

from __future__ import annotations

import re
from typing import Any

import torch

from btx_nemo.config.schema import TrainConfig
from btx_nemo.megatron.model import chunks
from btx_nemo.train.names import local_name

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_GROUPED = re.compile(r"(?<=^mlp\.experts\.)(linear_fc[12]\.weight)(\d+)$")


def global_names(gpt: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters under the names that they have in a model of Megatron's own layers on one rank.

    Megatron counts layers from each pipeline stage's first and experts from each rank's first, grouped experts have
    names of their own, Transformer Engine's layers have norms inside the next linear layer, and the last stage has a
    copy of a tied embedding under the output layer's name: a pattern must not mean something else in each layout or
    with each kind of layer.
    """
    return {_global_name(chunk, name): value for chunk in chunks(gpt) for name, value in chunk.named_parameters()}


def _global_name(gpt: torch.nn.Module, name: str) -> str:
    if name == "output_layer.weight" and getattr(gpt, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    found = _LAYER.search(name)
    if found is None:
        return name
    layer: Any = gpt.get_submodule(name[: found.end()])
    part = _GROUPED.sub(r"local_experts.\2.\1", name[found.end() + 1 :])
    part = _EXPERT.sub(lambda expert: str(layer.mlp.local_expert_indices[int(expert.group())]), part)
    return f"decoder.layers.{layer.layer_number - 1}.{local_name(part)}"


def freeze(model: torch.nn.Module, config: TrainConfig) -> None:
    """Turns gradients off for every parameter that `config` does not train.

    Call before the model is wrapped, so that frozen parameters get no gradient buffer, no optimizer state and no weight
    decay. That each pattern matches and something is left to train is known before: `stages.check_trained`.
    """
    for name, parameter in global_names(model).items():
        if not config.trains(name):
            parameter.requires_grad_(False)
