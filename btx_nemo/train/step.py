"""One optimizer step and one validation pass, on Megatron's own schedules.

Shape suffixes: B micro-batch, S sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from btx_nemo.megatron.documents import forward_masks
from btx_nemo.megatron.parallel import context_parallel_part
from btx_nemo.megatron.platform import device
from btx_nemo.routers.noise import micro_batch_seed
from btx_nemo.train.average import Average
from btx_nemo.train.optimizer_state import agree_on_loss_scale, loss_scale_is_least, sync_main_weights
from btx_nemo.train.routing import routers


@dataclass(frozen=True)
class StepResult:
    """What a training step says; the same on every rank."""

    loss: float
    """Mean cross-entropy per token (nats) over the global batch, without the balance loss; NaN where `empty`."""
    grad_norm: float
    """Global gradient norm before clipping."""
    ok: bool
    """False when the step was skipped: nothing has changed, but for Megatron's loss scale (fp16) where there is one."""
    lr: float
    """Learning rate of this step."""
    flags: tuple[bool, ...] = ()
    """Of each flag that was passed in, whether any rank had it set."""
    dataset_losses: dict[int, float] = field(default_factory=dict)
    """Mean cross-entropy per token of each dataset of the blend that the global batch has samples of."""
    empty: bool = False
    """Whether no token of the global batch is a target; the step was skipped, and nothing is wrong with the model."""

    @property
    def finite(self) -> bool:
        """False for a loss or a gradient that is NaN or infinite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Trainee:
    """A model that trains: this rank's part of it, wrapped, with its optimizer."""

    gpt: Any
    """The bare GPTModel, or its `Chunks`."""
    wrapped: list[Any]
    """The same in Megatron's DistributedDataParallel, a virtual pipeline stage each."""
    optimizer: Any
    scheduler: Any
    average: Average | None = None
    """Of the weights, where the run keeps one."""


@dataclass
class _ForwardStep:
    """Megatron's forward_step_func. Each micro-batch has its own seed, the same at every layout."""

    seed: int
    per_token_loss: bool
    first: int
    """Number of the global batch's first micro-batch since the beginning of the run."""
    routers: list[Any]
    """This rank's."""
    done: dict[int, int] = field(default_factory=dict)
    """Micro-batches of the global batch that each virtual pipeline stage has seen, by the stage's identity."""

    def __call__(self, batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
        from megatron.core import parallel_state as mpu

        done = self.done.get(id(model), 0)
        self.done[id(model)] = done + 1
        number = self.first + done * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank()
        # What draws noise derives its own generators from this seed: Megatron's recomputation restores it.
        torch.manual_seed((self.seed * 1_000_003 + number) % (1 << 63))
        batch = next(batches)
        masks = forward_masks(batch, model)
        batch = {key: value.to(device(), non_blocking=True) for key, value in batch.items()}
        count = batch["loss_mask"].sum()
        for router in self.routers:
            router.loss_tokens[micro_batch_seed()] = count
        batch = context_parallel_part(batch)
        mask_BS = batch["loss_mask"]
        losses_BS = model(batch["tokens"], batch["position_ids"], labels=batch["labels"], **masks)

        def loss_function(losses_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            masked_BS = losses_BS.float() * mask_BS
            total, count_here = masked_BS.sum(), mask_BS.sum()
            report = {"total": total.detach().clone(), "count": count_here}
            if "dataset_id" in batch:
                sums_B2 = torch.stack([masked_BS.detach().sum(1), mask_BS.sum(1)], dim=1)
                report |= {"dataset_id": batch["dataset_id"], "sums_B2": sums_B2}
            # Megatron divides by the number of tokens: of the step, which it adds up over all ranks, or of the
            # micro-batch, and then averages over the data- and context-parallel ranks, the latter of which have parts.
            if self.per_token_loss:
                return total, count_here.int(), report
            return total * mpu.get_context_parallel_world_size(), count.int(), report

        return losses_BS, loss_function


def _run_schedule(
    trainee: Trainee,
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
    stages = len(trainee.wrapped)
    return get_forward_backward_func()(
        forward_step_func=_ForwardStep(seed, trainee.gpt.config.calculate_per_token_loss, first, routers(trainee.gpt)),
        # Every virtual stage sees every micro-batch, at another time.
        data_iterator=list(itertools.tee(batches, stages)) if stages > 1 else batches,
        model=trainee.wrapped,
        num_microbatches=microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        **kw,
    )


def _over_all_ranks(outputs: list[dict[str, Tensor]], datasets: int = 0, *further: Any) -> tuple[list[float], Any]:
    """[total, count, further...] over all micro-batches and ranks, and [total, count] of each dataset. Collective.

    Only the last pipeline stage has outputs. All goes in one reduction: the device is waited for once.
    """
    sums = torch.zeros(2 + len(further) + 2 * datasets, dtype=torch.float64, device=device())
    by_dataset_D2 = sums[2 + len(further) :].view(datasets, 2)
    for output in outputs:
        sums[:2] += torch.stack([output["total"].double(), output["count"].double()])
        if "dataset_id" in output:
            by_dataset_D2.index_add_(0, output["dataset_id"], output["sums_B2"].double())
    for place, number in enumerate(further, start=2):
        sums[place] = number
    dist.all_reduce(sums)
    values = sums.tolist()
    return values[: 2 + len(further)], by_dataset_D2.tolist()


def _squares(wrapped: list[Any]) -> Tensor:
    """Sum of squares of this rank's gradients, in fp32 as Megatron's: NaN or infinite where one is, or is too large."""
    buffers = [b.grad_data for stage in wrapped for b in (*stage.buffers, *stage.expert_parallel_buffers)]
    norms = [torch.linalg.vector_norm(buffer, dtype=torch.float32) for buffer in buffers if buffer.numel()]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), device=device())


def train_step(
    trainee: Trainee,
    batches: Iterator,
    *,
    microbatches: int,
    micro_batch_size: int,
    seq_length: int,
    step: int = 0,
    seed: int = 0,
    datasets: int = 0,
    flags: Callable[[], tuple[bool, ...]] = tuple,
) -> StepResult:
    """Forward and backward of one global batch, gradient reduction, clipping, AdamW, learning rate.

    Where the loss or a gradient is not finite on any rank, or no token is a target, the step is skipped: nothing
    changes on any. `step` counts the steps before; with `seed` it fixes the noise that routers draw. `datasets` is how
    many the blend has. `flags` are asked for after the backward pass.
    """
    for router in routers(trainee.gpt):
        router.begin_step(step)
    for stage in trainee.wrapped:
        stage.train()
        stage.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    outputs = _run_schedule(
        trainee,
        batches,
        microbatches=microbatches,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        seed=seed,
        step=step,
        forward_only=False,
    )
    lr = trainee.scheduler.get_lr({})
    sums, by_dataset = _over_all_ranks(outputs, datasets, _squares(trainee.wrapped), *flags())
    total, count, squares, *flagged = sums
    # Without a target there is no loss, and momentum, decay and balance losses alone must not move weights.
    loss, grad_norm, ok = total / count if count else math.nan, squares**0.5, False
    # With a loss scale (fp16) Megatron itself skips such a gradient, and lowers the scale; without, it would take it.
    if math.isfinite(loss) and (math.isfinite(squares) or trainee.gpt.config.fp16):
        ok, norm, _ = trainee.optimizer.step()
        agree_on_loss_scale(trainee.optimizer)
        # An overflow is what a loss scale is there for, but not where it cannot fall any further.
        grad_norm = math.inf if not ok and loss_scale_is_least(trainee.optimizer) else float(norm or 0.0)
    if ok:
        _after_step(trainee)
    return StepResult(
        loss=loss,
        grad_norm=grad_norm,
        ok=bool(ok),
        lr=lr,
        flags=tuple(number > 0 for number in flagged),
        dataset_losses={i: total / count for i, (total, count) in enumerate(by_dataset) if count},
        empty=count == 0,
    )


def _after_step(trainee: Trainee) -> None:
    """All that follows a step which the optimizer took."""
    trainee.scheduler.step(increment=1)
    for router in routers(trainee.gpt):
        router.after_step()
    sync_main_weights(trainee.optimizer, [p for router in routers(trainee.gpt) for p in router.parameters()])
    if trainee.average is not None:
        trainee.average.update(trainee.scheduler.num_steps)


def mean_validation_loss(
    trainee: Trainee, batches: Iterator, *, microbatches: int, micro_batch_size: int, seq_length: int
) -> float:
    """Mean cross-entropy per token over `microbatches` of every data-parallel rank, with no gradient."""
    for stage in trainee.wrapped:
        stage.eval()
    with torch.no_grad():
        outputs = _run_schedule(
            trainee,
            batches,
            microbatches=microbatches,
            micro_batch_size=micro_batch_size,
            seq_length=seq_length,
            seed=0,
            step=0,
            forward_only=True,
        )
    (total, count), _ = _over_all_ranks(outputs)
    return total / max(count, 1.0)
