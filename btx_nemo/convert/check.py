"""What every import and export does before its result appears: read it back, and compare it with where it came from."""

from __future__ import annotations

from math import prod
from pathlib import Path

from btx_nemo.config.choice import check_choice
from btx_nemo.convert.logits import settled
from btx_nemo.convert.verify import compare_logits, compare_tensors, default_tolerance, probe
from btx_nemo.errors import CheckFailed
from btx_nemo.families.source import Source, open_unfinished
from btx_nemo.families.target import Target
from btx_nemo.plan.layout import ITEMSIZE

MODES = ("true", "false", "tensors", "logits")
"""`tensors` and, where both models are small enough, logits; nothing; tensors alone; both, however large."""
LARGEST = 250_000_000
"""Parameters of models whose logits are compared unasked: twice 1 GB of weights in fp32, seconds on a CPU."""


def check_mode(mode: str) -> None:
    """Raise UserError for a mode that is none."""
    check_choice("verify", mode, MODES)


def check_result(source: Source, folder: Path, mode: str, target: Target | None = None) -> str:
    """Compare a source with the result of its conversion in `folder`; what was done and found, in one line.

    `target` is what an export was written as: where that was not to compute the same, logits are not compared.
    Raises CheckFailed.
    """
    if mode == "false":
        return "not verified: verify=false"
    result = open_unfinished(folder, "result")
    exact = target is None or target.exact
    found = [_check_tensors(target.view(source) if target else source, result, exact)]
    if mode != "tensors":
        found.append(_check_logits(source, result, mode, exact))
    return "verified: " + "; ".join(found)


def _check_tensors(source: Source, result: Source, exact: bool) -> str:
    layouts = source.layout(), result.layout()
    alone = sorted(layouts[0].keys() ^ layouts[1].keys())
    if alone and exact:
        which = "source" if alone[0] in layouts[0] else "result"
        raise CheckFailed(
            f"{source.folder}: read back from the result, {len(alone)} tensors are on one side alone; the first is "
            f"{alone[0]}, which only the {which} has; nothing was kept"
        )
    if alone:
        return f"tensors not compared, since only one has {alone[0]} and the target was not to be exact"
    found = compare_tensors(source, result, cast=True)
    if found is not None:
        raise CheckFailed(
            f"{source.folder}: read back from the result, {found.differing} of {len(layouts[0])} tensors differ; "
            f"the first is {found.name}, by at most {found.largest:.3g}, at {list(found.at)}; nothing was kept"
        )
    return f"all {len(layouts[0])} tensors read back equal"


def _check_logits(source: Source, result: Source, mode: str, exact: bool) -> str:
    from btx_nemo.convert.verify import source_logits

    if not exact:
        return "logits not compared, since the target was not to be exact"
    if ITEMSIZE[result.dtype] < ITEMSIZE[source.dtype]:
        return f"logits not compared, since {result.dtype} rounds the weights"
    parameters = sum(prod(info.shape) for info in result.layout().values())
    if mode != "logits" and parameters > LARGEST:
        return f"logits not compared, since {parameters:,} parameters are over {LARGEST:,} (verify=logits does it)"
    difference = compare_logits(*(source_logits(each, probe(source)) for each in (source, result)))
    tolerance = default_tolerance(difference)
    if not difference.largest <= tolerance:
        raise CheckFailed(
            f"{source.folder}: the result's logits differ by {difference.largest:.3g} from the source's, over "
            f"the tolerance of {tolerance:g}; nothing was kept"
        )
    drawn = ", at inference=argmax" if settled(source.config) != source.config else ""
    return f"logits on the probe differ by at most {difference.largest:.2g} (tolerance {tolerance:g}){drawn}"
