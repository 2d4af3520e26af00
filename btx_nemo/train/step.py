"""One optimizer step and one validation pass, on Megatron's own schedules.

Shape suffixes: B micro-batch, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from btx_nemo.megatron.documents import forward_masks
from btx_nemo.megatron.platform import device
from btx_nemo.routers.noise import micro_batch_seed
from btx_nemo.train.routing import routers


@dataclass(frozen=True)
class StepResult:
    """What a training step says; the same on every rank."""

    loss: float
    """Mean cross-entropy per token (nats) over the global batch, without the balance loss."""
    grad_norm: float
    """Global gradient norm before clipping."""
    ok: bool
    """False when Megatron skipped the step, as it does with a loss scale (fp16)."""
    lr: float
    """Learning rate of this step."""
    stop: bool
    """Whether any rank was asked to stop."""

    @property
    def finite(self) -> bool:
        """False when the weights are lost: without a loss scale Megatron takes a step of any gradient."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Trainee:
    """A model that trains: this rank's part of it, wrapped, with its optimizer."""

    gpt: Any
    """The bare GPTModel."""
    wrapped: Any
    """The same in Megatron's DistributedDataParallel."""
    optimizer: Any
    scheduler: Any


@dataclass
class _ForwardStep:
    """Megatron's forward_step_func. Each micro-batch has its own seed, the same at every layout."""

    seed: int
    first: int
    """Number of the global batch's first micro-batch since the beginning of the run."""
    routers: list[Any]
    """This rank's."""
    done: int = 0
    """Micro-batches that this rank has seen of the global batch."""

    def __call__(self, batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
        from megatron.core import parallel_state as mpu

        number = self.first + self.done * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank()
        self.done += 1
        # What draws noise derives its own generators from this seed: Megatron's recomputation restores it.
        torch.manual_seed((self.seed * 1_000_003 + number) % (1 << 63))
        batch = next(batches)
        masks = forward_masks(batch, model)
        batch = {key: value.to(device(), non_blocking=True) for key, value in batch.items()}
        mask_BS = batch["loss_mask"]
        count = mask_BS.sum()
        for router in self.routers:
            router.loss_tokens[micro_batch_seed()] = count
        losses_BS = model(batch["tokens"], batch["position_ids"], labels=batch["labels"], **masks)

        def loss_function(losses_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = (losses_BS.float() * mask_BS).sum()
            # Megatron divides: by this count and the number of micro-batches, or by the step's tokens.
            return total, count.int(), {"total": total.detach().clone(), "count": count}

        return losses_BS, loss_function


def _run_schedule(
    model: Any,
    batches: Iterator,
    *,
    microbatches: int,
    micro_batch_size: int,
    seq_length: int,
    seed: int,
    step: int,
    **kw: Any,
):
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    first = step * microbatches * mpu.get_data_parallel_world_size()
    return get_forward_backward_func()(
        forward_step_func=_ForwardStep(seed, first, routers(model)),
        data_iterator=batches,
        model=[model],
        num_microbatches=microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        **kw,
    )


def _mean_loss(outputs: list[dict[str, Tensor]], flag: bool = False) -> tuple[float, bool]:
    """Mean per token over all micro-batches and ranks, and whether `flag` is set on any rank. Collective.

    Only the last pipeline stage has outputs. The flag rides along: a step waits for the device once.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device())
    for output in outputs:
        sums[:2] += torch.stack([output["total"].double(), output["count"].double()])
    sums[2] += flag
    dist.all_reduce(sums)
    total, count, flags = sums.tolist()
    return total / max(count, 1.0), flags > 0


def train_step(
    trainee: Trainee,
    batches: Iterator,
    *,
    microbatches: int,
    micro_batch_size: int,
    seq_length: int,
    step: int = 0,
    seed: int = 0,
    stop_asked: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Forward and backward of one global batch, gradient reduction, clipping, AdamW, learning rate.

    `step` counts the steps taken before; with `seed` it fixes the noise that routers draw. `stop_asked` is this rank's
    answer at the end of the step; the result says whether any rank's was yes.
    """
    for router in routers(trainee.gpt):
        router.begin_step(step)
    trainee.wrapped.train()
    trainee.wrapped.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    outputs = _run_schedule(
        trainee.wrapped,
        batches,
        microbatches=microbatches,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        seed=seed,
        step=step,
        forward_only=False,
    )
    lr = trainee.scheduler.get_lr({})
    ok, grad_norm, _ = trainee.optimizer.step()
    if ok:
        trainee.scheduler.step(increment=1)
        for router in routers(trainee.gpt):
            router.after_step()
    loss, stop = _mean_loss(outputs, stop_asked())
    return StepResult(loss=loss, grad_norm=float(grad_norm or 0.0), ok=bool(ok), lr=lr, stop=stop)


def mean_validation_loss(
    trainee: Trainee, batches: Iterator, *, microbatches: int, micro_batch_size: int, seq_length: int
) -> float:
    """Mean cross-entropy per token over `microbatches` of every data-parallel rank, with no gradient."""
    trainee.wrapped.eval()
    with torch.no_grad():
        outputs = _run_schedule(
            trainee.wrapped,
            batches,
            microbatches=microbatches,
            micro_batch_size=micro_batch_size,
            seq_length=seq_length,
            seed=0,
            step=0,
            forward_only=True,
        )
    return _mean_loss(outputs)[0]
