"""Execution: coverage is checked, results do not depend on workers or blocks, non-finite values are found exactly."""

from __future__ import annotations

import math

import pytest
import torch
from btx_testing.tensors import MemoryReader, MemorySink, info_of

from btx_nemo.errors import UserError
from btx_nemo.plan.execute import evaluate, execute
from btx_nemo.plan.expr import Concat, Expr, Mean, Normal, Take
from btx_nemo.plan.finite import all_finite
from btx_nemo.plan.layout import TensorInfo, row_blocks
from btx_nemo.plan.plan import Job, Plan
from btx_nemo.plan.table import plan_lines, summary_lines


def small_plan(reader: MemoryReader) -> Plan:
    parts = tuple(Take("s", name) for name in reader.tensors)
    info = info_of(next(iter(reader.tensors.values())))
    double = TensorInfo((info.shape[0] * len(parts), *info.shape[1:]), info.dtype)
    jobs = (
        Job("mean", info, Mean(parts)),
        Job("all", double, Concat(parts)),
        Job("gate", TensorInfo((9, 33), info.dtype), Normal(0.1)),
    )
    return Plan(jobs, {"s": reader.layout()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_workers_and_blocks_do_not_change_a_bit(dtype: torch.dtype) -> None:
    reader = MemoryReader({name: torch.randn(37, 11).to(dtype) for name in "abc"})
    results = []
    for workers, block in ((1, 1 << 20), (1, 40), (5, 40), (3, 300)):
        sink = MemorySink(block)
        execute(small_plan(reader), {"s": reader}, sink, seed=5, workers=workers)
        results.append(sink.tensors)
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in results[0])
    a, b, c = (reader.tensors[name].float() for name in "abc")
    assert torch.equal(results[0]["mean"], ((a + b + c) / 3).to(dtype)), "fp32, in order, then divided"


@pytest.mark.parametrize("workers", [1, 4])
def test_progress_is_told_every_byte_that_is_written(workers: int) -> None:
    reader = MemoryReader({name: torch.randn(37, 11) for name in "abc"})
    told: list[int] = []
    plan = small_plan(reader)
    execute(plan, {"s": reader}, MemorySink(300), workers=workers, progress=told.append)
    assert sum(told) == plan.nbytes and max(told) <= 300


def test_the_first_error_stops_all_workers_and_torchs_threads_are_as_before() -> None:
    tensors = {str(i): torch.randn(37, 11) for i in range(50)}
    tensors["3"][0, 0] = math.nan
    reader = MemoryReader(tensors)
    jobs = tuple(Job(name, info_of(tensor), Take("s", name)) for name, tensor in tensors.items())
    sink, before = MemorySink(), torch.get_num_threads()
    with pytest.raises(UserError, match="tensor '3' holds a non-finite"):
        execute(Plan(jobs, {"s": reader.layout()}), {"s": reader}, sink, workers=2)
    assert len({name for name, _ in sink.written}) < 50
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_non_finite_value_is_found_anywhere(dtype: torch.dtype, value: float) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([largest, -largest, 0.0, -0.0, torch.finfo(dtype).tiny], dtype=dtype).repeat(40)
    assert all_finite(tensor), "the largest finite values are finite, and their sum overflows"
    for at in (0, 57, 199):
        bad = tensor.clone()
        bad[at] = value
        assert not all_finite(bad)


def test_a_non_finite_value_is_named_with_file_tensor_and_index() -> None:
    tensors = {name: torch.randn(37, 11) for name in "abc"}
    tensors["b"][31, 4] = math.inf
    reader = MemoryReader(tensors)
    with pytest.raises(UserError, match=r"memory: tensor 'b' holds a non-finite value \(inf\) at index \[31, 4\]"):
        execute(small_plan(reader), {"s": reader}, MemorySink(100), workers=2)


def test_the_mean_of_equal_tensors_is_that_tensor() -> None:
    tensor = torch.randn(50, 7).bfloat16()
    for count in range(1, 9):
        reader = MemoryReader({str(i): tensor for i in range(count)})
        expr = Mean(tuple(Take("s", str(i)) for i in range(count)))
        assert torch.equal(evaluate(expr, {"s": reader}, info_of(tensor), "x", 0), tensor)


def test_casting_rounds_once_from_fp32() -> None:
    reader = MemoryReader({name: torch.randn(50, 7) for name in "ab"})
    out = evaluate(Mean((Take("s", "a"), Take("s", "b"))), {"s": reader}, TensorInfo((50, 7), "bfloat16"), "x", 0)
    assert torch.equal(out, ((reader.tensors["a"] + reader.tensors["b"]) / 2).bfloat16())


@pytest.mark.parametrize("block", [40, 1 << 20])
def test_a_result_beyond_its_dtype_is_an_error_and_no_infinity(block: int) -> None:
    def run(expr: Expr, dtype: str, reader: MemoryReader) -> None:
        execute(Plan((Job("x", TensorInfo((20, 3), dtype), expr),), {"s": reader.layout()}), {"s": reader}, sink)

    sink = MemorySink(block)
    cast = MemoryReader({"a": torch.randn(20, 3)})
    cast.tensors["a"][17, 2] = 1e5
    message = r"target tensor 'x' .*beyond the range of {} at index \[17, 2\]; choose another dtype"
    with pytest.raises(UserError, match=message.format("float16")):
        run(Take("s", "a"), "float16", cast)
    with pytest.raises(UserError, match=message.format("float16")):
        evaluate(Take("s", "a"), {"s": cast}, TensorInfo((20, 3), "float16"), "x", 0)
    run(Take("s", "a"), "bfloat16", cast)
    sum_ = MemoryReader({name: torch.randn(20, 3) for name in "ab"})
    for tensor in sum_.tensors.values():
        tensor[17, 2] = 3e38
    with pytest.raises(UserError, match=message.format("float32")):
        run(Mean((Take("s", "a"), Take("s", "b"))), "float32", sum_)
    with pytest.raises(UserError, match="target tensor 'x'"):
        run(Normal(1e6), "float16", MemoryReader({}))


def test_coverage_names_what_is_wrong() -> None:
    layout = {"s": {"a": TensorInfo((2,), "float32"), "b": TensorInfo((2,), "float32")}}
    a = Job("x", TensorInfo((2,), "float32"), Take("s", "a"))
    with pytest.raises(UserError, match="'b' has no place"):
        Plan((a,), layout).check()
    Plan((a,), layout, {("s", "b"): "not needed"}).check()
    with pytest.raises(UserError, match="'x' is written twice"):
        Plan((a, a), layout).check()
    with pytest.raises(UserError, match="'x' has shape"):
        Plan((Job("x", TensorInfo((3,), "float32"), Take("s", "a")),), layout).check()
    with pytest.raises(UserError, match="no tensor 'c'"):
        Plan((Job("x", TensorInfo((2,), "float32"), Take("s", "c")),), layout).check()
    with pytest.raises(UserError, match="dropped tensor"):
        Plan((a,), layout, {("s", "a"): "why", ("s", "b"): "why"}).check()


def test_blocks_cover_each_element_once_within_the_limit() -> None:
    for shape in ((), (5,), (100, 3), (3, 100), (4, 5, 60), (1, 1), (0, 4)):
        info = TensorInfo(shape, "float32")
        seen = torch.zeros(shape)
        for box in row_blocks(info, 64):
            part = seen[tuple(slice(low, high) for low, high in box)]
            assert part.numel() * 4 <= 64 and part.is_contiguous()
            part += 1
        assert bool((seen == 1).all())


def test_the_table_has_every_target_and_the_totals() -> None:
    reader = MemoryReader({name: torch.randn(37, 11) for name in "abc"})
    plan = small_plan(reader)
    lines = plan_lines(plan)
    assert [line.split()[0] for line in lines] == ["mean", "all", "gate"]
    assert "mean(s:a, s:b, s:c)" in lines[0] and "normal(std=0.1)" in lines[2]
    assert "peak memory" in summary_lines(plan, 2)[0]
    assert reader.elements_read == 0
