"""Which parameters a run trains: `freeze` and `train` on the model that was built."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from btx_nemo.config.schema import TrainConfig
from btx_nemo.megatron.model import chunks
from btx_nemo.megatron.platform import device
from btx_nemo.train.names import EXPERT, LAYER, local_name

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
    found = LAYER.search(name)
    if found is None:
        return name
    layer: Any = gpt.get_submodule(name[: found.end()])
    part = _GROUPED.sub(r"local_experts.\2.\1", name[found.end() + 1 :])
    part = EXPERT.sub(lambda expert: str(layer.mlp.local_expert_indices[int(expert.group())]), part)
    return f"decoder.layers.{layer.layer_number - 1}.{local_name(part)}"


def freeze(model: torch.nn.Module, config: TrainConfig) -> None:
    """Turns gradients off for every parameter that `config` does not train.

    Call before the model is wrapped, so that frozen parameters get no gradient buffer, no optimizer state and no weight
    decay. That each pattern matches and something is left to train is known before: `stages.check_trained`.
    """
    for name, parameter in global_names(model).items():
        if not config.trains(name):
            parameter.requires_grad_(False)
    _begin_backward(model, recompute=config.recompute != "none")


def _begin_backward(model: torch.nn.Module, *, recompute: bool) -> None:
    """Lets gradients flow where torch sees no need for them, but without them something would not train. Collective.

    Where only some ranks train a layer, having the experts that train, the others would have no backward pass while
    those wait for it in the exchange of tokens. And what is computed again in the backward pass has gradients inside
    only if its input has one (torch's re-entrant checkpoints), which nothing below gives where all of that is frozen.
    """
    layers: dict[int, Any] = {layer.layer_number: layer for chunk in chunks(model) for layer in chunk.decoder.layers}
    has_trains = torch.zeros(2, chunks(model)[0].config.num_layers + 1, dtype=torch.int64, device=device())
    for number, layer in layers.items():
        has_trains[:, number] = torch.tensor([1, any(p.requires_grad for p in layer.parameters())])
    dist.all_reduce(has_trains)
    has, trains = has_trains.tolist()
    for number, layer in layers.items():
        if 0 < trains[number] < has[number]:
            layer.mlp.register_forward_pre_hook(_input_with_gradient, with_kwargs=True)
    for chunk in chunks(model):
        if recompute and any(trains[layer.layer_number] for layer in chunk.decoder.layers):
            chunk.decoder.register_forward_pre_hook(_input_with_gradient, with_kwargs=True)


def _input_with_gradient(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Hook of a decoder or a feed-forward block. Pipeline stages after the first have their input from elsewhere."""
    if not torch.is_grad_enabled():
        return arguments, named
    if arguments:
        return (_with_gradient(arguments[0]), *arguments[1:]), named
    return arguments, {**named, "hidden_states": _with_gradient(named["hidden_states"])}


def _with_gradient(hidden: torch.Tensor | None) -> torch.Tensor | None:
    return hidden if hidden is None or hidden.requires_grad else hidden.detach().requires_grad_()
