"""How config.json says which layers attend to a sliding window only: four ways, one meaning.

Each reads (window, layer_types) in the form that ModelConfig has: no window where no layer uses it, no list where
all layers are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from btx_nemo.errors import UserError
from btx_nemo.families.config import FULL, SLIDING, ModelConfig
from btx_nemo.families.settings import flag, names_list, natural

Window = tuple[int | None, list[str] | None]


class Windows(Protocol):
    """One way to say it."""

    def read(self, config: Mapping[str, Any], where: str, layers: int) -> Window:
        """config.json -> (window, layer_types)."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Settings for config.json."""

    def holds(self, model: ModelConfig) -> bool:
        """Whether the model's windows can be said so."""


def _canonical(window: int | None, types: list[str]) -> Window:
    if window is None or SLIDING not in types:
        return None, None
    return window, types if FULL in types else None


def _types(model: ModelConfig) -> list[str]:
    return [SLIDING if model.is_sliding(layer) else FULL for layer in range(model.num_layers)]


@dataclass(frozen=True)
class NoWindow:
    """Every layer attends to all that came before."""

    def read(self, config: Mapping[str, Any], where: str, layers: int) -> Window:
        """transformers would ignore a window; who set one expects it to work."""
        window = config.get("sliding_window")
        if window is not None and config.get("use_sliding_window", True):
            raise UserError(
                f"{where}: sliding_window={window} is ignored by this architecture; set it to null, or choose another"
            )
        return None, None

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing to say."""
        return {}

    def holds(self, model: ModelConfig) -> bool:
        """Only without a window."""
        return model.sliding_window is None


@dataclass(frozen=True)
class EveryLayer:
    """`sliding_window` for all layers (Mistral, Mixtral), where `use_sliding_window` is not false (Qwen3Moe)."""

    default: int | None = None
    """The window where config.json is silent; null means none."""
    switch: bool = False
    """Whether `use_sliding_window` has to be true, which it is not by default."""

    def read(self, config: Mapping[str, Any], where: str, layers: int) -> Window:
        """See the class."""
        if self.switch and not flag(config, "use_sliding_window", where):
            return None, None
        if config.get("layer_types") is not None:
            raise UserError(f"{where}: layer_types is not supported here; only one sliding_window for all layers")
        if config.get("sliding_window", self.default) is None:
            return None, None
        return natural(config, "sliding_window", where, self.default), None

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See the class."""
        used = {"use_sliding_window": model.sliding_window is not None} if self.switch else {}
        return {"sliding_window": model.sliding_window, **used}

    def holds(self, model: ModelConfig) -> bool:
        """One window for all layers, or none."""
        return model.layer_types is None


@dataclass(frozen=True)
class LayerTypes:
    """`layer_types` names each layer's kind; where it is silent, every fourth is full (OLMo 3)."""

    default: int | None = 4096

    def read(self, config: Mapping[str, Any], where: str, layers: int) -> Window:
        """See the class."""
        types = names_list(config, "layer_types", where, layers, (FULL, SLIDING))
        types = types or [SLIDING if (layer + 1) % 4 else FULL for layer in range(layers)]
        if config.get("sliding_window", self.default) is None:
            if SLIDING in types:
                raise UserError(f"{where}: layer_types has {SLIDING} but sliding_window is null; give the window")
            return None, None
        return _canonical(natural(config, "sliding_window", where, self.default), types)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both spellings name every layer."""
        return {"sliding_window": model.sliding_window or self.default, "layer_types": _types(model)}

    def holds(self, model: ModelConfig) -> bool:
        """Any."""
        return True


@dataclass(frozen=True)
class SwitchedLayerTypes:
    """`use_sliding_window`, then `layer_types` or else `max_window_layers` full layers first (Qwen2, Qwen3)."""

    first_full: int | None = 28
    """max_window_layers where config.json is silent; None: layer_types has to be stated (Qwen2Moe, whose default
    differs between versions of transformers)."""

    def read(self, config: Mapping[str, Any], where: str, layers: int) -> Window:
        """See the class."""
        types = names_list(config, "layer_types", where, layers, (FULL, SLIDING))
        if not flag(config, "use_sliding_window", where):
            if types and SLIDING in types:
                raise UserError(f"{where}: layer_types has {SLIDING} but use_sliding_window is false; make them agree")
            return None, None
        if config.get("sliding_window", 4096) is None:
            raise UserError(f"{where}: use_sliding_window is true but sliding_window is null; give the window")
        if types is None:
            if self.first_full is None:
                raise UserError(f"{where}: use_sliding_window without layer_types is ambiguous; state layer_types")
            full = config.get("max_window_layers", self.first_full)
            if type(full) is not int or full < 0:
                raise UserError(f"{where}: max_window_layers={full!r} must be a whole number")
            types = [FULL if layer < full else SLIDING for layer in range(layers)]
        return _canonical(natural(config, "sliding_window", where, 4096), types)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both spellings where they can agree: transformers 4 and 5 read layer_types."""
        types = _types(model)
        return {
            "use_sliding_window": model.sliding_window is not None,
            "sliding_window": model.sliding_window,
            "max_window_layers": types.index(SLIDING) if SLIDING in types else model.num_layers,
            "layer_types": types,
        }

    def holds(self, model: ModelConfig) -> bool:
        """Any."""
        return True
