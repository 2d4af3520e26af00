"""A training run from its configuration to DONE: build, resume, train, validate, save."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.config.load import save_resolved
from btx_nemo.config.schema import TrainConfig
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.data.datasets import build_datasets
from btx_nemo.data.sampler import batches, num_microbatches, num_validation_microbatches, validation_batches
from btx_nemo.errors import CheckFailed, Stopped, UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.parallel import parallel_state
from btx_nemo.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from btx_nemo.train.contents import blend_of
from btx_nemo.train.length import with_steps
from btx_nemo.train.lock import claimed
from btx_nemo.train.metrics import MetricsFile, TrainProgress, routing_text
from btx_nemo.train.prepare import Prepared, prepare
from btx_nemo.train.routing import Routing, collect_routing, frozen_with_losses, reset_routing, separate_routing
from btx_nemo.train.setup import build_trainee
from btx_nemo.train.signals import StopRequest
from btx_nemo.train.step import StepResult, mean_validation_loss, train_step


def train(config: TrainConfig) -> None:
    """Runs, or resumes, the training run that `config` describes; nothing to do where `out`/DONE is.

    Raises UserError before anything is built when the configuration cannot work, and Stopped (exit code 75) after a
    checkpoint when SIGTERM or SIGUSR1 asked for it.
    """
    config = with_steps(config)
    prepared = prepare(config)
    if (prepared.out / "DONE").exists():
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{prepared.out}: done already (remove the folder to train again)")
        return
    with claimed(prepared.out) as made, parallel_state(config.layout, seed=config.seed), StopRequest() as stop:
        _Run(config, prepared, stop, made_out=made).go()


class _Run:
    """The state of one run on one rank."""

    def __init__(self, config: TrainConfig, prepared: Prepared, stop: StopRequest, *, made_out: bool):
        from megatron.core import parallel_state as mpu

        self.config, self.prepared, self.stop = config, prepared, stop
        self.model: ModelConfig = prepared.source.model
        self.out = prepared.out
        self._routing_text = ""
        self._dead: set[tuple[int, int]] = set()
        self.first = dist.get_rank() == 0
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.micro_batch_size, self.seq_length = config.micro_batch_size, config.data.seq_length
        self.microbatches = num_microbatches(
            global_batch_size=config.global_batch_size,
            dp_size=self.dp_size,
            micro_batch_size=self.micro_batch_size,
        )
        self.made_out = made_out
        if self.first:
            save_resolved(config, self.out / "resolved.yaml")
        dist.barrier()

    def go(self) -> None:
        """All of it."""
        try:
            train_set, self.valid_sets = self._datasets()
            self.trainee = build_trainee(self.config, self.prepared.source, documents=self.prepared.documents)
        except UserError:
            if self.made_out:  # what only building could find out: leave nothing that the next try has to agree with
                shutil.rmtree(self.out, ignore_errors=True)
            raise
        checkpoint = latest_checkpoint(self.out)
        step = load_checkpoint(checkpoint, self.trainee) if checkpoint else 0
        self.metrics = MetricsFile(self.out / "metrics.jsonl", resumed_at=step) if self.first else None
        data = batches(
            train_set,
            consumed_samples=step * self.config.global_batch_size,
            global_batch_size=self.config.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        )
        tokens = self.config.global_batch_size * self.seq_length
        name = self.config.domain or self.config.stage
        self.bar = TrainProgress(
            total=self.config.steps,
            done=step,
            name=name,
            tokens_per_step=tokens,
            show=self.first,
            every=self.config.log_every,
        )
        with self.bar:
            for domain, content in self.prepared.contents.items():
                self.bar.say(f"{domain}: {content.text(self.seq_length)}")
            if frozen_with_losses(self.trainee.gpt):
                self.bar.say(
                    f"warning: the routers are frozen, so that router.losses={self.config.router.losses} move only the "
                    "layers before them; router.losses.NAME=0 turns one off"
                )
            if step == 0:
                self._validate(0)
            if checkpoint is None and self.config.steps == 0:  # a run of no steps still leaves its model
                self._save(0)
            self._loop(step, data)
        self._finish()

    def _datasets(self) -> tuple[Any, dict[str, Any]]:
        config = self.config
        blend, valid = blend_of(config)
        return build_datasets(
            Path(config.data.path),
            blend,
            seq_length=config.data.seq_length,
            train_samples=max(config.steps, 1) * config.global_batch_size,
            valid_samples=config.eval_batches * config.global_batch_size,
            seed=config.seed,
            cache_dir=self.out / "cache",
            domains_for_validation=valid,
            vocab_size=self.model.vocab_size,
            whole_passes=config.epochs is not None,
            document_mask=config.data.document_mask,
            sample=config.data.sample,
        )

    def _loop(self, step: int, data: Iterator[dict[str, Any]]) -> None:
        config = self.config
        while step < config.steps:
            reset_routing(self.trainee.gpt)
            result = train_step(
                self.trainee,
                data,
                microbatches=self.microbatches,
                micro_batch_size=self.micro_batch_size,
                seq_length=self.seq_length,
                step=step,
                seed=config.seed,
                stop_asked=lambda: self.stop.asked,
            )
            step += 1
            self._check_finite(step, result)
            if step % config.log_every == 0 or step == config.steps:
                self._log(step, result)
            text = f"loss {result.loss:.3f}  grad {result.grad_norm:.2f}{self._routing_text}"
            self.bar.update(step, text)
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                self._validate(step)
            if result.stop or step == config.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
                self._save(step)
            if result.stop and step < config.steps:
                raise Stopped(f"{self.out}: stopped on request after step {step}; the same command resumes")

    def _check_finite(self, step: int, result: StepResult) -> None:
        if not result.finite:
            saved = latest_checkpoint(self.out)
            raise CheckFailed(
                f"{self.out}: training broke down at step {step} (loss {result.loss}, gradient norm "
                f"{result.grad_norm}); the last checkpoint ({saved.name if saved else 'none'}) is as it was; start "
                "another out from it, with a lower optim.lr or optim.clip_grad, or other data"
            )

    def _log(self, step: int, result: StepResult) -> None:
        routing = collect_routing(self.trainee.gpt, self.model)
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "skipped": not result.ok,
            "lr": result.lr,
            "tokens_per_second": round(self.bar.tokens_per_second(step), 1),
        }
        if routing is not None:
            record |= routing.record()
            text = routing_text(routing.load, routing.entropy, routing.dropped, len(routing.dead))
            self._routing_text = f"  {text}"
            self._warn_of_dead(routing)
        if self.metrics:
            self.metrics.write(record)

    def _warn_of_dead(self, routing: Routing) -> None:
        """Names each expert that no token chose in this step, once as long as it stays so."""
        names = self.model.moe.experts if self.model.moe else []
        for layer, expert in sorted(set(routing.dead) - self._dead):
            name = f" ({names[expert]})" if names else ""
            self.bar.say(f"warning: layer {layer}: expert {expert}{name} got no token in this step")
        self._dead = set(routing.dead)

    def _validate(self, step: int) -> None:
        config = self.config
        record: dict[str, Any] = {"step": step, "valid": {}, "routing": {}}
        share = {
            "micro_batch_size": self.micro_batch_size,
            "dp_size": self.dp_size,
            "num_samples": config.eval_batches * config.global_batch_size,
        }
        for domain, dataset in self.valid_sets.items():
            with separate_routing(self.trainee.gpt):
                record["valid"][domain] = mean_validation_loss(
                    self.trainee,
                    validation_batches(dataset, dp_rank=self.dp_rank, **share),
                    microbatches=num_validation_microbatches(dataset, **share),
                    micro_batch_size=self.micro_batch_size,
                    seq_length=self.seq_length,
                )
                routing = collect_routing(self.trainee.gpt, self.model)
            if routing is not None:
                record["routing"][domain] = routing.load
        if self.metrics:
            self.metrics.write(record)
        losses = "  ".join(f"{domain} {loss:.4f}" for domain, loss in record["valid"].items())
        self.bar.say(f"step {step}: validation loss  {losses}")

    def _save(self, step: int) -> None:
        save_checkpoint(
            self.out,
            self.trainee,
            step,
            self.model,
            self.prepared.tokenizer,
            self.config.checkpoint.keep,
        )

    def _finish(self) -> None:
        """Exports when asked, then writes DONE: a killed run that lacks it does this again. The other ranks go home."""
        if self.first:
            if self.config.export:
                export = self.out / "hf"
                if export.exists():  # of a run that was killed between the export and DONE
                    shutil.rmtree(export)
                export_hf(self.out, export)
            write_file(self.out / "DONE", json.dumps({"step": self.config.steps}) + "\n")
