"""`python -m btx_testing.mortal --die RANK:STEP train ...`: the command line, one rank of which dies before a step."""

from __future__ import annotations

import os
import sys

from btx_testing import death


def main() -> None:
    """Runs the command without the first two arguments."""
    _, _, place, *arguments = sys.argv
    rank, step = place.split(":")
    if os.environ.get("RANK", "0") == rank:
        death.at(f"btx_nemo.train.run:train_step:{step}")
    from btx_nemo.cli import main as command

    command(arguments)


if __name__ == "__main__":
    main()
