"""Options of sbatch that a user gives, beside those that a pipeline needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from btx_nemo.errors import UserError

RESERVED = (
    *("--array", "--wrap", "--test-only", "--parsable", "--wait", "--output", "--job-name", "--export"),
    *("--help", "--usage", "--version"),
)
"""Options that `submit` gives itself, or with which it would not get a job of its own, with a known id."""
SHORT = "aWoJhVd"
"""Those, and the dependency, as one letter."""
DEPENDENCY = "--dependency"


def check_options(where: str, options: Iterable[str]) -> None:
    """Raise UserError, which begins with `where`, for an option that a pipeline's job cannot have."""
    for option in options:
        name, _, value = option.partition("=")
        if any(_means(name, reserved) for reserved in RESERVED):
            raise UserError(f"{where}: sbatch option {option!r}: btx-nemo submit cannot pass it on; leave it out")
        if re.match(f"-[{SHORT}]", name):
            raise UserError(f"{where}: sbatch option {option!r}: leave it out, or spell a dependency {DEPENDENCY}=...")
        # It is joined to what the pipeline itself waits for, which are several, all of them needed.
        if _means(name, DEPENDENCY) and not re.fullmatch(r"[a-z]+(:[0-9_+]+)*(,[a-z]+(:[0-9_+]+)*)*", value, re.ASCII):
            raise UserError(
                f"{where}: sbatch option {option!r}: expected {DEPENDENCY}=afterok:ID[:ID...][,afterany:ID...]"
            )


def without_dependencies(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """The other options, and what the jobs are to wait for beside the pipeline's own."""
    waits = [option for option in options if _means(option.partition("=")[0], DEPENDENCY)]
    return [option for option in options if option not in waits], [option.partition("=")[2] for option in waits]


def _means(name: str, option: str) -> bool:
    """Whether sbatch takes it for that option: it may be cut short."""
    return len(name) > 4 and option.startswith(name)
