"""What `slurm/eval.sh` leaves: the losses that the runs of a pipeline measured themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.errors import UserError
from btx_nemo.launch.identity import made_of
from btx_nemo.launch.status import newest_record


def losses(runs: Path, out: Path) -> None:
    """Writes `out`/losses.json, the last validation losses that each run measured, and DONE; prints them as a table.

    Of experts only those that the mixture was made of, where that is recorded.
    """
    found, mix = {}, made_of(runs, "mix")
    for path in sorted(runs.glob("*/metrics.jsonl")):
        name = path.parent.name
        if mix is not None and name.startswith("expert-") and name.partition(".")[0] not in mix.inputs:
            continue
        record = newest_record(path.parent, "valid")
        if record is not None and re.fullmatch(r"seed|anchor|router|joint|expert-.*", name):
            found[name] = record["valid"]
    if not found:
        raise UserError(f"{runs}: no run has measured a validation loss")
    out.mkdir(exist_ok=True)
    write_file(out / "losses.json", json.dumps(found, indent=2) + "\n")
    width = max(map(len, found))
    for name, values in found.items():
        print(f"{name:<{width}}  " + "  ".join(f"{domain} {loss:.4f}" for domain, loss in values.items()))
    write_file(out / "DONE", "")
