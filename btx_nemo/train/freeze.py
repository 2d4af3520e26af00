"""Which parameters a run trains: patterns over their names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from btx_nemo.errors import UserError
from btx_nemo.megatron.model import chunks
from btx_nemo.megatron.platform import device

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_GROUPED = re.compile(r"(?<=\.mlp\.experts\.)(linear_fc[12]\.weight)(\d+)$")


def global_names(gpt: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters under the names that they have in a model on one rank.

    Megatron counts layers from each pipeline stage's first and experts from each rank's first, grouped experts have
    names of their own, and the last stage has a copy of a tied embedding under the output layer's name: a pattern must
    not mean something else in each layout or with each kind of layer.
    """
    return {_global_name(chunk, name): value for chunk in chunks(gpt) for name, value in chunk.named_parameters()}


def _global_name(gpt: torch.nn.Module, name: str) -> str:
    if name == "output_layer.weight" and getattr(gpt, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    found = _LAYER.search(name)
    if found is None:
        return name
    layer: Any = gpt.get_submodule(name[: found.end()])
    name = _GROUPED.sub(r"local_experts.\2.\1", name)
    name = _EXPERT.sub(lambda expert: str(layer.mlp.local_expert_indices[int(expert.group())]), name)
    return _LAYER.sub(str(layer.layer_number - 1), name)


def freeze(model: torch.nn.Module, patterns: Sequence[str], *, but: Sequence[str] = ()) -> list[str]:
    """Turns gradients off for every parameter whose global name a pattern matches; returns these on this rank.

    With patterns in `but`, those that none of them matches are frozen as well: only what they name trains.

    Call before the model is wrapped, so that frozen parameters get no gradient buffer, no optimizer state and no weight
    decay. Raises UserError on all ranks for a pattern that matches nothing on any, and when nothing at all would train.
    """
    names = global_names(model)
    frozen = [name for name in names if _matches(name, patterns) or (but and not _matches(name, but))]
    every = [("freeze", pattern) for pattern in patterns] + [("train", pattern) for pattern in but]
    hits = [sum(fnmatch.fnmatchcase(name, pattern) for name in names) for _, pattern in every]
    counts = torch.tensor([*hits, len(names) - len(frozen)], dtype=torch.int64, device=device())
    dist.all_reduce(counts)
    *hits, left = counts.tolist()
    for (key, pattern), count in zip(every, hits):
        if count == 0:
            raise UserError(f"{key}: {pattern!r} matches no parameter; names look like {next(iter(names))!r}")
    if left == 0:
        raise UserError(f"freeze: {list(patterns)} leaves nothing to train; drop a pattern")
    for name in frozen:
        names[name].requires_grad_(False)
    _same_graph_on_all_ranks(model)
    return frozen


def _same_graph_on_all_ranks(model: torch.nn.Module) -> None:
    """Gives a layer that only some of its ranks train, having the experts that train, a gradient on all. Collective.

    A rank without would have no backward pass where the others wait for it, in the exchange of tokens.
    """
    layers: dict[int, Any] = {layer.layer_number: layer for chunk in chunks(model) for layer in chunk.decoder.layers}
    has_trains = torch.zeros(2, chunks(model)[0].config.num_layers + 1, dtype=torch.int64, device=device())
    for number, layer in layers.items():
        has_trains[:, number] = torch.tensor([1, any(p.requires_grad for p in layer.parameters())])
    dist.all_reduce(has_trains)
    has, trains = has_trains.tolist()
    for number, layer in layers.items():
        if 0 < trains[number] < has[number]:
            layer.mlp.register_forward_pre_hook(_with_gradient)


def _with_gradient(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *rest = arguments
    if not torch.is_grad_enabled() or hidden.requires_grad:
        return arguments
    return (hidden.detach().requires_grad_(), *rest)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
