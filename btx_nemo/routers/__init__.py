"""Routers by name. The registry is open: `register_router("mine", "my_package.my_module:MyRouter")`."""

from __future__ import annotations

import importlib
from typing import Any

from btx_nemo.errors import UserError

# Names map to "module:class", so that listing them imports no Megatron.
_ROUTERS: dict[str, str] = {"top_k": "btx_nemo.routers.top_k:TopKRouter"}

LOSSES = ("btx", "none")


def register_router(name: str, target: str) -> None:
    """Adds a router: `target` is "module:class" of a `routers.base.BaseRouter`. Raises ValueError for a taken name."""
    if name in _ROUTERS and _ROUTERS[name] != target:
        raise ValueError(f"router {name!r} is {_ROUTERS[name]} already")
    _ROUTERS[name] = target


def router_names() -> list[str]:
    """All registered names."""
    return sorted(_ROUTERS)


def check_router(name: str, loss: str = "btx") -> None:
    """Raises UserError, listing the known ones, when the router or its balance loss is unknown."""
    if name not in _ROUTERS:
        raise UserError(f"moe.router={name}: no such router; known: {', '.join(router_names())}")
    if loss not in LOSSES:
        raise UserError(f"router.loss={loss}: no such balance loss; known: {', '.join(LOSSES)}")


def router_class(name: str) -> Any:
    """The class behind a name."""
    check_router(name)
    module, _, attribute = _ROUTERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
