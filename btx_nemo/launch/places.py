"""Where a pipeline lives, and what lies in what: no file is read, links are followed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.errors import UserError
from btx_nemo.launch.config import PipelineConfig


@dataclass(frozen=True)
class Places:
    """Where a pipeline lives."""

    runs: Path
    seed: Path
    anchor: Path
    data: Path
    chats: Path

    @property
    def environment(self) -> dict[str, str]:
        """By the names that the scripts know."""
        return {f"BTX_{name.upper()}": str(folder) for name, folder in vars(self).items()}


def places(config: PipelineConfig) -> Places:
    """The folders of a pipeline, absolute. Raises UserError for a name that the scripts could not pass on."""
    runs = Path(config.runs)
    seed = config.seed or runs / "seed"
    anchor = config.anchor or (runs / "anchor" if config.anchor_training else seed)
    given = (runs, seed, anchor, config.data or runs / "data", config.chats or runs / "chats")
    found = Places(*(Path(os.path.abspath(folder)) for folder in given))  # as the scripts do: no `..` stays
    for name, folder in vars(found).items():
        if re.search(r"['\\\\$\n]", str(folder)):
            raise UserError(
                f"{name}={str(folder)!r}: has a quote, a backslash, a dollar or a line break in it; use another folder"
            )
    return found


def within(out: Path, paths: Iterable[Path]) -> bool:
    """Whether one of the paths is an output or in it, however it is spelled: through links, with `..`.

    Where the output is itself a link, what goes by its name is in it, and not what happens to be where it leads to.
    """
    out = _place(out)
    for path in paths:
        given = Path(os.path.abspath(path))
        if Path(os.path.realpath(path)).is_relative_to(out) or out in map(_place, (given, *given.parents)):
            return True
    return False


def _place(path: Path) -> Path:
    """The one name of a path itself, not of what it leads to where it is a link."""
    return Path(os.path.realpath(path.parent), path.name)
