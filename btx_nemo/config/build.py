"""From plain dictionaries to frozen dataclasses, strictly: no unknown key, no missing value, no wrong type."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from btx_nemo.errors import UserError

T = TypeVar("T")


def build(cls: type[T], values: Any, *, where: str, path: str = "") -> T:
    """An instance of the dataclass `cls` from a nested dictionary.

    `where` names the source in errors (a file, a command line). Raises UserError at the first key that is unknown,
    missing or of the wrong type; an unknown key's error lists the known ones.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: {path or cls.__name__} must be a mapping, not {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UserError(f"{where}: unknown key {_join(path, key)}; known: {', '.join(fields)}")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, f in fields.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], where, _join(path, name))
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: {_join(path, name)} is required; give {_join(path, name)}=VALUE")
    return cls(**arguments)


def _convert(hint: Any, value: Any, where: str, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (a for a in arguments if a is not type(None))
        return _convert(hint, value, where, path)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where=where, path=path)  # type: ignore[arg-type]
    if origin is list and isinstance(value, (list, tuple)):
        return [_convert(arguments[0], v, where, f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {str(k): _convert(arguments[1], v, where, _join(path, str(k))) for k, v in value.items()}
    if hint is Any or (hint is float and type(value) is int):
        return float(value) if hint is float else value
    if isinstance(hint, type) and type(value) is hint:
        return value
    expected = getattr(hint, "__name__", str(hint)) if origin is None else "a mapping" if origin is dict else str(hint)
    shown = "nothing (null)" if value is None else f"{value!r} ({type(value).__name__})"
    remedy = f"; quote a text that looks like a number: \"'{value}'\"" if (hint, type(value)) == (str, int) else ""
    raise UserError(f"{where}: {path} must be {expected}, not {shown}{remedy}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)
