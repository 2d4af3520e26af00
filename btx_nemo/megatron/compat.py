"""What differs between Megatron-Core 0.16 and 0.19, decided by what is there, never by a version string."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any


def has_transformer_engine() -> bool:
    """Whether Megatron's Transformer Engine layers can be used: the package, and a GPU to run them on."""
    import torch
    from megatron.core.extensions import transformer_engine

    return torch.cuda.is_available() and getattr(transformer_engine, "HAVE_TE", False)


def with_router(mlp: Any, router: Callable[..., Any]) -> Any:
    """A changed copy of a layer's MoE `mlp` entry: a ModuleSpec in 0.16, a partial of the layer in 0.19."""
    if isinstance(mlp, functools.partial):
        submodules = dataclasses.replace(mlp.keywords["submodules"], router=router)
        return functools.partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": submodules})
    return dataclasses.replace(mlp, submodules=dataclasses.replace(mlp.submodules, router=router))


def supported(function: Callable[..., Any], **candidates: Any) -> dict[str, Any]:
    """Those of the keyword arguments that the function's signature knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in candidates.items() if name in known}
