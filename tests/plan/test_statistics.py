"""Numbers measured before a plan is carried out: against torch on the whole, whatever the blocks and workers."""

from __future__ import annotations

import pytest
import torch
from btx_testing.tensors import MemoryReader, info_of

from btx_nemo.errors import UserError
from btx_nemo.plan import statistics
from btx_nemo.plan.execute import evaluate
from btx_nemo.plan.expr import Choice, Combine, Expr, Take, Ties
from btx_nemo.plan.fresh import chosen
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.statistics import Majority, Moments, Statistic, Threshold, measure, with_values

SHAPES = {"a": (40, 30), "b": (7,), "c": (3, 5, 11)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK_BYTES", 256)


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def measured(given: dict[str, Statistic], **sources: dict[str, torch.Tensor]) -> dict[str, float]:
    readers = {name: MemoryReader(each) for name, each in sources.items()}
    layouts = {name: reader.layout() for name, reader in readers.items()}
    results = [measure(given, readers, layouts, seed=4, workers=workers) for workers in (1, 5)]
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.0, 1e-9, 0.01, 0.2, 0.5, 1.0])
def test_a_threshold_is_the_exact_order_statistic(density: float, dtype: torch.dtype) -> None:
    given = tensors(1, dtype)
    found = measured({"t": Threshold(tuple(Take("s", name) for name in SHAPES), density)}, s=given)["t"]
    values = torch.cat([tensor.float().abs().flatten() for tensor in given.values()]).sort(descending=True).values
    kept = int(density * len(values))
    assert found == (values[kept - 1] if kept else float("inf"))


def test_a_threshold_of_zeros_and_of_equal_values() -> None:
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    parts = tuple(Take("s", name) for name in SHAPES)
    assert measured({"t": Threshold(parts, 0.3)}, s=given) == {"t": 0.0}
    given["a"][:5] = -3.0
    assert measured({"t": Threshold(parts, 0.05), "u": Threshold(parts, 0.9)}, s=given) == {"t": 3.0, "u": 0.0}


@pytest.mark.parametrize("dim", [0, 1])
def test_moments_are_those_of_the_chosen_part(dim: int) -> None:
    given = {"a": tensors(2)["a"] * 0.01 + 5}
    choice = Choice("x", 9, SHAPES["a"][dim])
    found = measured({"m": Moments(Take("s", "a"), dim, choice)}, s=given)
    part = given["a"].index_select(dim, chosen(4, choice, SHAPES["a"][dim])).double()
    assert found["m/mean"] == pytest.approx(float(part.mean()), rel=1e-9)
    assert found["m/std"] == pytest.approx(float(part.std()), rel=1e-6)


def naive_ties(base: torch.Tensor, tuned: list[torch.Tensor], density: float, scale: float) -> torch.Tensor:
    """The paper's algorithm on flattened float64 models, element by element."""
    changes = [model.double() - base.double() for model in tuned]
    kept = []
    for change in changes:
        border = change.abs().sort(descending=True).values[int(density * len(change)) - 1]
        kept.append(torch.where(change.abs() >= border, change, 0.0))
    signs = torch.stack(kept).sum(0).sign()
    signs[signs == 0] = signs.sum().sign()
    result = base.double().clone()
    for i in range(len(base)):
        agreeing = [change[i] for change in kept if change[i] != 0 and change[i].sign() == signs[i]]
        result[i] += scale * (sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return result


def test_ties_over_the_whole_model_against_a_naive_loop() -> None:
    base, models = (
        {name: tensor.round() for name, tensor in tensors(0).items()},
        {name: tensors(seed) for seed, name in enumerate("xyz", 1)},
    )
    for name, factor in zip(models, (1, -1, 0), strict=True):  # changes that cancel: the model's majority decides
        models[name]["b"] = base["b"] + factor * torch.tensor([4.0, -4.0, 0, 8, -8, 1, 2])
    sources = {"base": base, **models}

    def ties(name: str, sign: float | str) -> Ties:
        return Ties(tuple(Take(source, name) for source in sources), ("t/x", "t/y", "t/z"), 0.7, sign)

    def change(source: str, name: str) -> Expr:
        return Combine((Take(source, name), Take("base", name)), (1.0, -1.0))

    given: dict[str, Statistic] = {f"t/{m}": Threshold(tuple(change(m, n) for n in SHAPES), 0.3) for m in models}
    given["sign"] = Majority(tuple(ties(name, 1.0) for name in SHAPES))
    values = measured(given, **sources)
    readers = {name: MemoryReader(each) for name, each in sources.items()}
    flat = {source: torch.cat([each[name].flatten() for name in SHAPES]) for source, each in sources.items()}
    expected = naive_ties(flat["base"], [flat[m] for m in models], 0.3, 0.7).float().split([1200, 7, 165])
    for (name, shape), whole in zip(SHAPES.items(), expected, strict=True):
        expr = with_values(ties(name, "sign"), values)
        result = evaluate(expr, readers, info_of(base[name]), name, 0)
        torch.testing.assert_close(result, whole.view(shape), atol=1e-6, rtol=1e-6)


def test_a_plan_that_needs_a_number_which_nobody_measures_is_refused() -> None:
    info = TensorInfo((2,), "float32")
    job = Job("x", info, Combine((Take("s", "a"),), ("m/mean",)))
    plan = Plan((job,), {"s": {"a": info}})
    with pytest.raises(UserError, match=r"needs \['m/mean'\], never measured"):
        plan.check()
    Plan(plan.jobs, plan.sources, statistics={"m": Moments(Take("s", "a"), 0, Choice("k", 1, 2))}).check()
