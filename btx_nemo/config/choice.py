"""A setting that is one of a few words."""

from __future__ import annotations

from collections.abc import Iterable

from btx_nemo.errors import UserError


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Raise UserError, listing the known ones, for a word that is none of them."""
    if value not in known:
        raise UserError(f"{name}={value}: unknown; known: {', '.join(known)}")
