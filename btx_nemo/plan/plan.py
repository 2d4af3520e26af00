"""A plan: which tensors to write, each from which expression; closed by a coverage check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from btx_nemo.errors import UserError
from btx_nemo.plan.expr import Expr, describe, infer, numbers, takes
from btx_nemo.plan.layout import Layout, TensorInfo
from btx_nemo.plan.statistics import Statistic

__all__ = ["Job", "Layout", "Plan", "TensorInfo"]


@dataclass(frozen=True)
class Job:
    """One tensor to write. Where the expression's dtype differs from `info.dtype`, the result is cast."""

    target: str
    info: TensorInfo
    expr: Expr


@dataclass(frozen=True)
class Plan:
    """All tensors to write, over the layouts of the sources."""

    jobs: tuple[Job, ...]
    sources: Mapping[str, Layout]
    dropped: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(source, tensor) -> the reason why it is not used."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Source -> where it lies, for errors."""
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    """Name -> what has to be measured before anything is written; later ones may need earlier ones' numbers."""

    @property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(job.info.nbytes for job in self.jobs)

    def check(self) -> None:
        """Coverage: each target once, shapes agree, every Take exists, each source tensor used or named as dropped.

        Raises UserError naming the first tensor that is not so.
        """
        seen: set[str] = set()
        known = {number for name, statistic in self.statistics.items() for number in statistic.names(name)}
        used: set[tuple[str, str]] = set()
        for job in self.jobs:
            if job.target in seen:
                raise UserError(f"plan: target {job.target!r} is written twice; every target must be written once")
            seen.add(job.target)
            info = infer(job.expr, self.sources, job.info)
            if info.shape != job.info.shape:
                raise UserError(
                    f"plan: target {job.target!r} has shape {list(job.info.shape)} but {describe(job.expr)} gives "
                    f"{list(info.shape)}; is config.json that of these weights?"
                )
            if info.dtype != job.info.dtype and not (_floating(info.dtype) and _floating(job.info.dtype)):
                raise UserError(f"plan: target {job.target!r} cannot be cast from {info.dtype} to {job.info.dtype}")
            if numbers(job.expr) - known:
                raise UserError(
                    f"plan: target {job.target!r} needs {sorted(numbers(job.expr) - known)}, never measured"
                )
            used |= {(take.source, take.name) for take in takes(job.expr)}
        for source, layout in self.sources.items():
            for name in layout:
                if (source, name) not in used and (source, name) not in self.dropped:
                    where = self.folders.get(source, f"source {source!r}")
                    raise UserError(
                        f"{where}: tensor {name!r} has no place in the result and is not named as dropped; "
                        "is it the architecture it says it is?"
                    )
        for source, name in self.dropped:
            if name not in self.sources.get(source, {}) or (source, name) in used:
                raise UserError(f"plan: dropped tensor {source}:{name} is not there, or used after all")


def _floating(dtype: str) -> bool:
    return "float" in dtype
