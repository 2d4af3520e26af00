"""The one rule for the names of domains, which become folders, experts, keys of settings and names of jobs."""

from __future__ import annotations

import re

from btx_nemo.errors import UserError

DOMAIN = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)
"""`slurm/common.sh` has the same."""
RESERVED = ("seed", "generalist", "tokenizer", "text")
"""Names with a meaning of their own in a mix or a data folder."""


def check_domain(name: str, where: str) -> None:
    """Raise UserError, which begins with `where`, for a name that a domain cannot have."""
    if not DOMAIN.fullmatch(name):
        raise UserError(f"{where}: only a-z, 0-9, _ and - are allowed, a letter first; rename the domain")
    if name in RESERVED:
        raise UserError(f"{where}: has another meaning, as have {', '.join(RESERVED)}; rename the domain")
