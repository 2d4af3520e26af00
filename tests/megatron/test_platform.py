"""The CPU platform: scoped, re-entrant, and unseen from outside."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from btx_testing.pool import RankPool

from btx_nemo.megatron import platform
from btx_nemo.megatron.platform import cpu_platform, device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the platform does nothing where a GPU is")


def names() -> dict[tuple[Any, str], Any]:
    """Everything that the platform replaces, as it is now."""
    stubs = [*platform._torch_stubs(), *platform._megatron_stubs()]
    return {(owner, name): getattr(owner, name, None) for owner, name, _ in stubs}


def test_everything_is_put_back() -> None:
    with cpu_platform():
        pass  # imports Megatron in the platform's scope
    before, missing = names(), not hasattr(torch.cuda, "no_such")
    with cpu_platform():
        during = names()
    assert names() == before
    assert missing
    changed = [name for (owner, name), value in during.items() if value is not before[(owner, name)]]
    assert {"current_device", "Stream", "Event", "synchronize", "maybe_move_tensor_to_cpu"} <= set(changed)


def test_everything_is_put_back_after_an_error() -> None:
    before = names()
    with pytest.raises(ZeroDivisionError), cpu_platform():
        _ = 1 / 0
    assert names() == before


def test_entering_again_changes_nothing() -> None:
    before = names()
    with cpu_platform():
        during = names()
        with cpu_platform():
            assert torch.zeros(1, device="cuda").device.type == "cpu"
            # The functions are made anew each time; the classes tell whether anything was replaced twice.
            assert torch.cuda.Stream is platform._Inert
            assert names() == during
        assert names() == during
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert names() == before


def test_outside_torch_is_as_it_was() -> None:
    with cpu_platform():
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()


@pytest.mark.parametrize("cuda", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)])
def test_cuda_means_cpu_inside(cuda: Any) -> None:
    x = torch.arange(3.0)
    with cpu_platform():
        made = [torch.empty(1, device=cuda), torch.tensor([1], device=cuda), x.to(cuda), x.to(device=cuda), x.cuda()]
        made += [torch.zeros(1, device=cuda, pin_memory=True), torch.full((1,), 2.0, device=cuda), x.to(cuda, x.dtype)]
        assert {tensor.device.type for tensor in made} == {"cpu"}
        assert torch.equal(x.to(cuda), x)


def test_streams_and_events_are_inert_classes() -> None:
    with cpu_platform():
        assert isinstance(torch.cuda.Stream | None, object)
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        event.record(stream)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
        with pytest.raises(AttributeError):
            _ = stream.__no_such__


def test_the_gpu_s_generator_is_another_than_the_cpu_s() -> None:
    """As on a GPU: Megatron swaps its states in tensor-parallel regions, and the CPU's seed stays what the loop set."""
    before = torch.get_rng_state()
    with cpu_platform():
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(4)
        assert not torch.equal(torch.cuda.get_rng_state(), state)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_is_noted_for_no_device_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch sets one, and torch would note for each absent device from where."""
    with cpu_platform():
        monkeypatch.setattr(traceback, "format_stack", pytest.fail)
        assert torch.manual_seed(5).initial_seed() == 5 == torch.initial_seed()


def test_a_gpu_would_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with cpu_platform():
        assert names() == before


def test_the_device_is_the_cpu() -> None:
    assert device() == torch.device("cpu")
    assert platform.backend() == "gloo"


def test_parallel_state_leaves_nothing(ranks: RankPool) -> None:
    from btx_testing import train_jobs

    assert ranks.run(train_jobs.after_parallel_state, {"tp": 2}, ranks=2) == [[True, False, False]] * 2
