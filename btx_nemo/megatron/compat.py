"""What differs between Megatron-Core 0.16 and 0.19, decided by what is there, never by a version string."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock


def has_transformer_engine() -> bool:
    """Whether Megatron's Transformer Engine layers can be used: the package, and a GPU to run them on."""
    from megatron.core.extensions import transformer_engine

    from btx_nemo.megatron.platform import has_gpu

    return has_gpu() and getattr(transformer_engine, "HAVE_TE", False)


def with_router(mlp: Any, router: Callable[..., Any]) -> Any:
    """A changed copy of a layer's MoE `mlp` entry."""
    return _with_submodules(mlp, router=router)


def with_linear_fc1(mlp: Any, linear: Any) -> Any:
    """A changed copy of a dense layer's `mlp` entry, with another first linear layer."""
    return _with_submodules(mlp, linear_fc1=linear)


def _with_submodules(mlp: Any, **changes: Any) -> Any:
    """A ModuleSpec in 0.16, a partial of the layer in 0.19."""
    if isinstance(mlp, functools.partial):
        submodules = dataclasses.replace(mlp.keywords["submodules"], **changes)
        return functools.partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": submodules})
    return dataclasses.replace(mlp, submodules=dataclasses.replace(mlp.submodules, **changes))


def supported(function: Callable[..., Any], **candidates: Any) -> dict[str, Any]:
    """Those of the keyword arguments that the function's signature knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in candidates.items() if name in known}


def mark_tensor_parallel(gpt: Any) -> None:
    """Marks the split weights as split. 0.16 does so only while it initialises them, which we leave to a plan.

    Without the marks all ranks but the first count their part as a copy, and the gradient norm is too small.
    """
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )

    for module in gpt.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            weight = module.weight
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                dim = 1 if isinstance(module, RowParallelLinear) else 0
                set_tensor_model_parallel_attributes(tensor=weight, is_parallel=True, dim=dim, stride=1)


def mark_experts(gpt: Any) -> None:
    """Marks the experts' weights as such: their gradients are summed over all ranks that hold the same expert.

    Megatron does so only where experts are spread (ep > 1). Without the mark, tensor-parallel ranks that hold whole
    experts but, by sequence parallelism, different tokens would each train a version of their own.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for module in gpt.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False


def chained(optimizer: Any) -> list[Any]:
    """Megatron's optimizers on this rank, those without a parameter too: it chains them only where they are several."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def mend_mixed_dtypes(optimizer: Any) -> None:
    """Corrects where Megatron's distributed optimizer looks for a parameter's state when a group has two dtypes.

    It puts a group's fp32 parameters (our routers) before the main copies of the others, but remembers the order in
    which they lie in the buffers; a checkpoint would then get one parameter's moments under another's name.
    """
    for part in chained(optimizer):
        for index, fp32 in enumerate(getattr(part, "model_fp32_groups", [])):
            for order, parameter in enumerate([*fp32, *part.model_float16_groups[index]]):
                part.model_param_group_index_map[parameter] = (index, order)


def mend_offloaded_fp32(optimizer: Any) -> None:
    """Lets Megatron's offloaded optimizer train the fp32 parameters (our routers) that it leaves on the device.

    It takes gradients from where Megatron puts them, `decoupled_grad`, only for parameters that have an fp32 copy;
    others would never move. So each of them is called its own copy.
    """
    for part in chained(optimizer):
        hybrid: Any = getattr(part, "optimizer", None)
        for weight, inner in getattr(hybrid, "param_to_inner_param", {}).items():
            if weight is inner:
                hybrid.param_to_fp32_param[weight] = weight


@contextlib.contextmanager
def version_without_transformer_engine() -> Iterator[None]:
    """Where Transformer Engine is absent, 0.16 fails as it compares its version; 0.19 takes it for 0.0.0, as here."""
    from megatron.core import utils

    if utils.get_te_version() is not None:
        yield
        return
    with mock.patch.object(utils, "_te_version", utils.PkgVersion("0.0.0")):
        yield


def planned_save(state: dict[str, Any], folder: str, metadata: dict[str, Any], results: Any) -> Any:
    """Megatron's request for a save that is yet to be carried out: what to write, and how to finish. Collective.

    The writer leaves its results in `results` (put, get_nowait). Without it, Megatron starts a manager process for a
    queue, which outlives a killed run for ever and, worse, dies of a signal to the whole job (Slurm's SIGTERM).
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async

    how = supported(dist_checkpointing.save, async_strategy="mcore")  # 0.19's default is a package of its own
    strategy = getattr(common, "TorchCommonSaveStrategy", None)  # of 0.16
    writes = [(strategy, "save_common")] if strategy is not None else []
    with mock.patch.object(filesystem_async, "_results_queue", results), _errors_after(writes):
        return dist_checkpointing.save(state, folder, async_sharded_save=True, content_metadata=metadata, **how)


def finish_save(request: Any) -> None:
    """What Megatron does once a planned save is written everywhere. Collective, whatever happens to files."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    with _errors_after([(serialization, "save_config"), (FileSystemWriterAsync, "finish")]):
        for step in request.finalize_fns:
            step()


@contextlib.contextmanager
def _errors_after(writes: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Keeps the errors of these functions (owner, name) until the end.

    The first rank alone writes files between Megatron's collectives: an error there would leave the other ranks in one
    that never comes.
    """
    errors: list[Exception] = []

    def kept(write: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                write(*args, **kwargs)
            except Exception as error:
                errors.append(error)

        return call

    with contextlib.ExitStack() as patched:
        for owner, name in writes:
            patched.enter_context(mock.patch.object(owner, name, kept(getattr(owner, name))))
        yield
    if errors:
        raise errors[0]
