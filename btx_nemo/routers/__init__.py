"""Routers by name. The registry is open: `register_router("mine", "my_package.my_module:MyRouter")`.

A package may instead offer an entry point in the group `btx_nemo.routers`: name = "module:class".
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points
from typing import Any

from btx_nemo.errors import UserError

ENTRY_POINTS = "btx_nemo.routers"

# Names map to "module:class", so that listing them imports no Megatron.
_ROUTERS: dict[str, str] = {
    "top_k": "btx_nemo.routers.top_k:TopKRouter",
    "switch": "btx_nemo.routers.switch:SwitchRouter",
    "soft": "btx_nemo.routers.soft:SoftRouter",
    "sample_top1": "btx_nemo.routers.sample_top1:SampleTop1Router",
    "noisy_top_k": "btx_nemo.routers.noisy_top_k:NoisyTopKRouter",
    "divmoe": "btx_nemo.routers.divmoe:DivMoERouter",
    "flexolmo": "btx_nemo.routers.flexolmo:FlexOlmoRouter",
    "nexus": "btx_nemo.routers.nexus:NexusRouter",
    "expert_choice": "btx_nemo.routers.expert_choice:ExpertChoiceRouter",
}


def register_router(name: str, target: str | type) -> None:
    """Adds a router: a `routers.base.BaseRouter`, or "module:class" of one. Raises ValueError for a taken name."""
    target = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
    if _known().get(name, target) != target:
        raise ValueError(f"router {name!r} is {_known()[name]} already")
    _ROUTERS[name] = target


@functools.cache
def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def _known() -> dict[str, str]:
    return _installed() | _ROUTERS  # an installed package cannot replace one of ours unseen


def router_names() -> list[str]:
    """All registered names."""
    return sorted(_known())


def router_class(name: str) -> Any:
    """The class behind a name. Raises UserError, listing the known ones, when there is none."""
    if name not in _known():
        raise UserError(f"moe.router={name}: no such router; known: {', '.join(router_names())}")
    module, _, attribute = _known()[name].partition(":")
    from btx_nemo.megatron.platform import cpu_platform

    try:
        with cpu_platform():  # a router's module imports Megatron
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"moe.router={name}: {_known()[name]} cannot be imported: {error}") from error
