"""Megatron-Core on a machine without a GPU: every stub that it needs, in one scope.

Megatron-Core names `cuda` in many places but computes with ordinary torch operations; over gloo all of its
parallelism runs on the CPU. `cpu_platform()` redirects those names for as long as it is entered, and only where
there is no GPU: with one, it does nothing. No other module of the project asks what the device is.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_MISSING = object()
_cuda_generator = torch.Generator()
"""Holds the state of the GPU's generator, which Megatron swaps in tensor-parallel regions: never the CPU's own, from
which the routers derive their seeds. Nothing that we build draws from it (there is no dropout)."""


def has_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def select_device(local_rank: int) -> None:
    """Gives this process its GPU of the node; nothing where there is none."""
    if has_gpu():
        torch.cuda.set_device(local_rank)


def device() -> torch.device:
    """The device that models live on: this process's GPU, or the CPU where there is none."""
    if has_gpu():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name() -> str:
    """What the GPU calls itself ("NVIDIA H100 80GB HBM3"); empty where there is none."""
    return torch.cuda.get_device_name() if has_gpu() else ""


def capability() -> tuple[int, int] | None:
    """Compute capability of this process's GPU; None where there is none."""
    return torch.cuda.get_device_capability() if has_gpu() else None


def cuda_version() -> str:
    """CUDA that torch was built for; empty for none."""
    return torch.version.cuda or ""


def peak_memory() -> int:
    """Bytes: the most that tensors took on this process's GPU, or that the process took where there is none."""
    if has_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def backend() -> str:
    """The torch.distributed backend for `device()`."""
    return "nccl" if has_gpu() else "gloo"


def _names_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _CudaToCpu(TorchFunctionMode):
    """Sends every `device="cuda"` to the CPU."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
            if "pin_memory" in kwargs:
                kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if func is torch.Tensor.to:
            if len(args) > 1 and _names_cuda(args[1]):
                args = (args[0], "cpu", *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer accepts parameters by this name, torch.cuda.FloatTensor and its like.
            return func(args[0]).replace("torch.", "torch.cuda.")
        elif func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        return func(*args, **(kwargs or {}))


class _CpuAsBoth(TorchFunctionMode):
    """A GPU and its host for Megatron's offloaded optimizer, which asks each tensor where it is.

    All are on the GPU, but for what `cpu()` gave and what was made of that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        on_host = bool(args) and id(args[0]) in self.host
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not on_host
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (on_host or func is torch.Tensor.cpu):
            self.host[id(result)] = result
        return result


class _Inert:
    """Stands for CUDA streams and events, which order work that on the CPU is ordered already."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Inert]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


def _torch_stubs() -> list[tuple[Any, str, Any]]:
    cuda = torch.cuda
    return [
        # Megatron's fused functions are compiled as it is imported: two seconds of every process, and none runs here.
        (torch, "compile", lambda function=None, **_: function or (lambda decorated: decorated)),
        (cuda, "current_device", lambda: torch.device("cpu")),
        (cuda, "Stream", _Inert),  # classes: transformers evaluates `Stream | None`
        (cuda, "Event", _Inert),
        (cuda, "current_stream", lambda *_, **__: _Inert()),
        (cuda, "default_stream", lambda *_, **__: _Inert()),
        (cuda, "stream", lambda *_, **__: contextlib.nullcontext()),
        (cuda, "synchronize", lambda *_, **__: None),
        (cuda, "get_rng_state", lambda *_, **__: _cuda_generator.get_state()),
        (cuda, "set_rng_state", lambda state, *_, **__: _cuda_generator.set_state(state)),
        (cuda, "manual_seed", _cuda_generator.manual_seed),
        # torch.manual_seed tells every kind of device; for one that is not there it notes the seed and the whole stack,
        # which took 7 ms of each micro-batch.
        *((device, "manual_seed_all", lambda seed: None) for device in (cuda, torch.xpu, torch.mtia)),
    ]


def _megatron_stubs() -> list[tuple[Any, str, Any]]:
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    recompute = random.CheckpointFunction.backward

    def recompute_redirected(*args: Any) -> Any:
        # torch.autograd.backward goes through the redirection as one call, within which it is off.
        with _CudaToCpu():
            return recompute(*args)

    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divide_redirected(*args: Any) -> Any:
        with _CpuAsBoth():
            return divide(*args)

    return [
        (random.CheckpointFunction, "backward", staticmethod(recompute_redirected)),
        (HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divide_redirected),
        (random, "_get_cuda_rng_state", lambda *_, **__: _cuda_generator.get_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: _cuda_generator.set_state(state)),
        # Experts that are cut (etp > 1) get other numbers of tokens from each rank.
        (dist, "all_gather", _all_gather_of_any_size),
        (dist, "reduce_scatter", _reduce_scatter_of_any_size),
        # 0.16 uses this name without defining it where Transformer Engine is absent.
        (moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None)),
        # The original copies through pinned memory and waits on a stream.
        (token_dispatcher, "maybe_move_tensor_to_cpu", move_to_cpu),
    ]


_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def _all_gather_of_any_size(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **kw: Any) -> Any:
    """gloo gathers only tensors of one shape: others are filled up to the longest, and cut again."""
    if all(output.shape == tensor.shape for output in outputs):
        return _all_gather(outputs, tensor, group=group, **kw)
    longest = max(len(output) for output in outputs)
    padded = [tensor.new_empty(longest, *tensor.shape[1:]) for _ in outputs]
    _all_gather(padded, _filled_up(tensor, longest), group=group)
    for output, found in zip(outputs, padded, strict=True):
        output.copy_(found[: len(output)])
    return None


def _reduce_scatter_of_any_size(output: torch.Tensor, inputs: list[torch.Tensor], group: Any = None, **kw: Any) -> Any:
    """The same for sums of which each rank gets its part."""
    if all(tensor.shape == output.shape for tensor in inputs):
        return _reduce_scatter(output, inputs, group=group, **kw)
    longest = max(len(tensor) for tensor in inputs)
    padded = output.new_empty(longest, *output.shape[1:])
    _reduce_scatter(padded, [_filled_up(tensor, longest) for tensor in inputs], group=group)
    output.copy_(padded[: len(output)])
    return None


def _filled_up(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


@contextlib.contextmanager
def cpu_platform() -> Iterator[None]:
    """Lets Megatron-Core run on the CPU while entered; nothing where a GPU is there, and re-entrant.

    Everything is put back on leaving. Enter it before Megatron-Core is imported for the first time, and in the thread
    that computes (the redirection is per thread).
    """
    if has_gpu() or torch.cuda.Stream is _Inert:
        yield
        return
    with contextlib.ExitStack() as stack:
        for stub in _torch_stubs():
            stack.enter_context(_patched(*stub))
        mode = stack.enter_context(_CudaToCpu())
        assert mode is not None
        for stub in _megatron_stubs():
            stack.enter_context(_patched(*stub))
        yield


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
