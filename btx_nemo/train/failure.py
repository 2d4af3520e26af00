"""The first cause of a run's end, told once: a rank that fails takes all others with it, and each would complain."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.atomic import FULL
from btx_nemo.errors import BtxError, RankFailed, Stopped, UserError

CAUSE = "failure.json"
LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|timed out|remote process exited|socket error", re.I
)
"""What a collective says on the ranks that are still there; it is no OSError, as a file system's time-out is."""
PATIENCE = 3.0
"""Seconds in which the rank that failed has said why, before another one says that it was lost."""


def forget(out: Path) -> None:
    """Removes what an earlier start left. First rank only."""
    for path in (*out.glob("failure*"), *out.glob("hang-rank-*")):
        path.unlink(missing_ok=True)


def claim(out: Path, rank: int, cause: str) -> bool:
    """Whether this rank is the first of the job to fail, and so the one that tells; its cause is in failure.json."""
    facts = {"rank": rank, "host": socket.gethostname(), "cause": cause}
    try:
        with (out / CAUSE).open("x") as file:
            json.dump(facts, file)
    except FileExistsError:
        return False
    except OSError:  # a full disk: then every rank tells
        return True
    return True


@contextlib.contextmanager
def first_cause(out: Path, rank: int, ranks: int, where: Callable[[], str]) -> Iterator[None]:
    """Turns what ends a rank into RankFailed, one line with the first cause, told by one rank; a traceback in a file.

    `where` says how far the run is. Errors of ours pass as they are, and a full disk becomes a UserError.
    """
    try:
        yield
    except Stopped:
        raise
    except BtxError as error:
        claim(out, rank, str(error))
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            line = f"{error.filename or out}: {error.strerror}; free space and run the same command again"
            claim(out, rank, line)
            raise UserError(f"{line}; the last checkpoint is as it was") from error
        text = " ".join(str(error).split("\n")[0].split())[:300]
        at = f"rank {rank} on {socket.gethostname()}, after {where()}"
        if ranks > 1 and not isinstance(error, OSError) and LOST.search(str(error)):
            first = not _told(out) and claim(out, rank, f"{at}: lost another rank")
            line = f"{out}: {at}: another rank was lost (killed, out of memory, its node down?): {text}"
        else:
            line = f"{out}: {at}: {type(error).__name__}: {text}"
            first = claim(out, rank, line)
        kept = _keep_traceback(out, rank)
        raise RankFailed(f"{line}; {kept}the last checkpoint is as it was", first=first) from error


def _told(out: Path) -> bool:
    """Whether another rank says why it failed, within a moment."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if (out / CAUSE).exists():
            return True
        time.sleep(0.05)
    return False


def _keep_traceback(out: Path, rank: int) -> str:
    path: Any = out / f"failure-rank-{rank}.txt"
    try:
        path.write_text(traceback.format_exc())
    except OSError:
        traceback.print_exc()
        return ""
    return f"traceback in {path.name}; "
