"""What recipes have in common: the targets of a model, each with its expression; chunks, scales, fresh rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from btx_nemo.errors import UserError
from btx_nemo.families import base, names
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.mix.recipes.base import Ingredients
from btx_nemo.plan.expr import Combine, Concat, Expr, Mean, Normal, Slice, Take, infer, takes
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.statistics import Statistic

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The expression of each kind of target."""

    rest: Callable[[str], Expr]
    """Tensors that a dense model has too, its feed-forward blocks in dense layers among them."""
    expert: Callable[[int, int, str], Expr] | None = None
    """(layer, expert, part) of a routed expert."""
    router: Callable[[str], Expr] | None = None
    """A router's tensor, by its name."""
    shared_expert: Callable[[int, str], Expr] | None = None
    """(layer, part) of the shared expert."""
    statistics: Mapping[str, Statistic] = field(default_factory=dict)

    def of(self, target: str, given: Ingredients) -> tuple[Expr, str]:
        """(expression, dtype) of a target."""
        expert, shared = names.parse_expert(target), names.parse_shared_expert(target)
        if expert and self.expert:
            return self.expert(*expert), _ffn_dtype(given, target, expert[0], expert[2])
        if shared and self.shared_expert:
            return self.shared_expert(*shared), _ffn_dtype(given, target, *shared)
        if names.parse_router(target) and self.router:
            expr = self.router(target)
            # What a router was trained to, in fp32, is not rounded to the dtype of the rest.
            kept = infer(expr, given.layouts).dtype if takes(expr) else given.dtype_of(EMBEDDING)
            return expr, given.dtype or kept
        return self.rest(target), given.dtype_of(target)


def _ffn_dtype(given: Ingredients, target: str, layer: int, part: str) -> str:
    layout = given.layouts[given.seed]
    like = (target, names.ffn(layer, part), names.expert(layer, 0, part))
    return given.dtype_of(next(name for name in like if name in layout))


def plan_of(given: Ingredients, model: ModelConfig, parts: Parts, unused: Mapping[str, str]) -> Plan:
    """The plan of a whole model. `unused`: source -> why what is not used of it is not; others must be used whole."""
    jobs = []
    for target, info in base.layout(model, "float32").items():
        expr, dtype = parts.of(target, given)
        jobs.append(Job(target, TensorInfo(info.shape, dtype), expr))
    return Plan(tuple(jobs), given.layouts, dropped(given, jobs, unused), statistics=parts.statistics)


def dropped(given: Ingredients, jobs: list[Job], unused: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """What the jobs do not use of the sources in `unused`, with its reason there."""
    used = {(take.source, take.name) for job in jobs for take in takes(job.expr)}
    return {
        (source, name): reason
        for source, reason in unused.items()
        for name in given.layouts[source]
        if (source, name) not in used
    }


def mixture_of(given: Ingredients, moe: MoEConfig, width: int | None = None) -> ModelConfig:
    """The dense model as a mixture, whose experts are `width` wide (default: as its feed-forward blocks)."""
    return dataclasses.replace(given.model, moe=moe, ffn_hidden_size=width or given.model.ffn_hidden_size)


def mean(members: tuple[str, ...]) -> Callable[[str], Expr]:
    """Tensor -> the uniform mean over sources."""
    return lambda name: Mean(tuple(Take(member, name) for member in members))


def ffn(source: str, layer: int, part: str) -> Expr:
    """A matrix of a dense source's feed-forward block."""
    return Take(source, names.ffn(layer, part))


def axis(part: str) -> int:
    """The dimension of a feed-forward matrix along which its neurons lie."""
    return 1 if part == "down" else 0


def chunk(expr: Expr, part: str, number: int, width: int) -> Expr:
    """The `number`-th slice of `width` neurons: rows of gate and up, columns of down."""
    return Slice(expr, axis(part), number * width, (number + 1) * width)


def width_of(given: Ingredients, pieces: int, what: str) -> int:
    """The width of one of `pieces` equal slices of a feed-forward block. Raises UserError when they are not equal."""
    width = given.model.ffn_hidden_size
    if pieces < 1:
        raise UserError(f"{what}={pieces} must be at least 1")
    if width % pieces:
        raise UserError(f"{what}={pieces} does not divide the feed-forward width intermediate_size={width}")
    return width // pieces


def scaled(expr: Expr, factor: float) -> Expr:
    """The expression times a number."""
    return expr if factor == 1 else Combine((expr,), (factor,))


def fresh_rows(given: Ingredients, target: str, rows: int, std: float, key: str = "") -> Normal:
    """Fresh rows [rows, H] of a router's weight, the same whatever they become a part of."""
    info = TensorInfo((rows, given.model.hidden_size), given.dtype_of(EMBEDDING))
    return Normal(std, key=target + key, info=info)


def repeated_rows(rows: Expr, order: list[int]) -> Expr:
    """Rows of a matrix in another order, some of them more than once."""
    return Concat(tuple(Slice(rows, 0, row, row + 1) for row in order))


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raise UserError for an option out of its bounds."""
    if not low <= value <= high:
        raise UserError(f"{name}={value:g} must be from {low:g} to {high:g}")
