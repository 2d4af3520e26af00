"""Embedders by name. The registry is open: `register_embedder("mine", load)`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from btx_nemo.errors import UserError

Embedder: TypeAlias = "Callable[[Sequence[Sequence[int]]], Tensor]"
"""Documents as token ids -> one row each, [documents, D]; a row with NaN counts as no document."""

_EMBEDDERS: dict[str, Callable[[Path], Embedder]] = {}


def register_embedder(name: str, load: Callable[[Path], Embedder]) -> None:
    """Adds one; `load` is given the model's folder. Raises ValueError when the name is taken."""
    if name in _EMBEDDERS:
        raise ValueError(f"embedder {name!r} is registered already")
    _EMBEDDERS[name] = load


def load_embedder(name: str, model: Path) -> Embedder:
    """An embedder that is ready to run. Raises UserError, listing the known ones, when there is none."""
    if name not in _EMBEDDERS:
        raise UserError(f"embedder={name}: unknown; known: {', '.join(sorted(_EMBEDDERS))}")
    return _EMBEDDERS[name](model)


def mean_hidden_state(model: Path) -> Embedder:
    """Mean over a document's tokens of the last hidden state, after the final norm, in fp32: D is the model's width."""
    from btx_nemo.convert.logits import load_hf
    from btx_nemo.convert.to_hf import export_hf
    from btx_nemo.families.source import open_source

    if open_source(model).kind == "hf":
        network = load_hf(model).base_model
    else:
        with tempfile.TemporaryDirectory(prefix="btx-embed-") as folder:
            export_hf(model, Path(folder) / "hf")
            network = load_hf(Path(folder) / "hf").base_model

    @torch.no_grad()
    def embed(documents: Sequence[Sequence[int]]) -> Tensor:
        rows = []
        for ids in documents:  # one by one: no padding, so no document depends on the others
            hidden = network(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
            rows.append(hidden[0].float().mean(dim=0))
        return torch.stack(rows)

    return embed


register_embedder("mean_hidden_state", mean_hidden_state)
