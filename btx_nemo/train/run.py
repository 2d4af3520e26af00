"""A training run from its configuration to DONE: build, resume, train, validate, save."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from btx_nemo.checkpoints.atomic import disk_errors, hide, write_file
from btx_nemo.config.load import save_resolved
from btx_nemo.config.schema import TrainConfig
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.data.datasets import build_datasets
from btx_nemo.data.sampler import batches, num_microbatches
from btx_nemo.errors import CheckFailed, Stopped, UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.parallel import parallel_state
from btx_nemo.train.checkpoint import latest_checkpoint, load_checkpoint, on_first_rank
from btx_nemo.train.contents import blend_of
from btx_nemo.train.data_record import record_data
from btx_nemo.train.failure import first_cause, forget
from btx_nemo.train.hang import HangDetector, timeout_minutes
from btx_nemo.train.length import with_steps
from btx_nemo.train.lock import claimed
from btx_nemo.train.prepare import Prepared, prepare
from btx_nemo.train.report import Report
from btx_nemo.train.routing import collect_routing, frozen_with_losses, reset_routing
from btx_nemo.train.saving import Saver
from btx_nemo.train.setup import build_trainee
from btx_nemo.train.signals import StopRequest
from btx_nemo.train.step import StepResult, train_step
from btx_nemo.train.validate import validate
from btx_nemo.train.watch import Watch, batch_ids


def train(config: TrainConfig) -> None:
    """Runs, or resumes, the training run that `config` describes; nothing to do where `out`/DONE is.

    Raises UserError before anything is built when the configuration cannot work, Stopped (exit code 75) after a
    checkpoint when SIGTERM or SIGUSR1 asked for it, and CheckFailed when too many steps in a row had no finite loss.
    """
    config = with_steps(config)
    prepared = prepare(config)
    if (prepared.out / "DONE").exists():
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{prepared.out}: done already (remove the folder to train again)")
        return
    groups = parallel_state(config.layout, seed=config.seed, timeout_minutes=timeout_minutes(config.robust))
    with claimed(prepared.out) as made, groups, StopRequest() as stop:
        run = Run(config, prepared, stop)
        with first_cause(run.out, run.rank, dist.get_world_size(), lambda: run.hang.last):
            with run.hang:
                run.train(made)
            run.finish()  # however long an export takes


class Run:
    """The state of one run on one rank."""

    def __init__(self, config: TrainConfig, prepared: Prepared, stop: StopRequest):
        self.config, self.prepared, self.stop = config, prepared, stop
        self.model: ModelConfig = prepared.source.model
        self.out = prepared.out
        self.rank = dist.get_rank()
        self.first = self.rank == 0
        self.watch = Watch(config.robust)
        self.saver = Saver(self.out, config.checkpoint, self.model, prepared.tokenizer)
        self.hang = HangDetector(self.out, self.rank, config.robust.hang_seconds)

    def train(self, made: bool) -> None:
        """Builds and trains. A new folder (`made`) goes again when only building could find out what is wrong."""
        try:
            self.build()
        except UserError:
            if made:
                shutil.rmtree(hide(self.out), ignore_errors=True)  # another rank may be telling of its failure in it
            raise
        try:
            self.go()
        finally:
            self.saver.abandon()

    def build(self) -> None:
        """Datasets and model, after what an earlier start said of itself has gone."""
        on_first_rank(self._begin)
        config = self.config
        blend, valid = blend_of(config)
        self.domains = list(blend)
        self.train_set, self.valid_sets = build_datasets(
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
        self.hang.beat("opening the data")
        self.trainee = build_trainee(config, self.prepared.source, documents=self.prepared.documents)
        self.hang.beat("building the model")

    def _begin(self) -> None:
        with disk_errors(self.out):
            forget(self.out)
            save_resolved(self.config, self.out / "resolved.yaml")
            record_data(self.out, self.config)

    def go(self) -> None:
        """From the last checkpoint, where there is one, to the end."""
        checkpoint = latest_checkpoint(self.out)
        step = 0
        if checkpoint is not None:
            verify = self.config.checkpoint.verify
            step, watched = load_checkpoint(checkpoint, self.trainee, steps=self.config.steps, verify=verify)
            self.watch.load_state(watched)
        with self.reporting(step):
            for domain, content in self.prepared.contents.items():
                self.report.say(f"{domain}: {content.text(self.config.data.seq_length)}")
            if frozen_with_losses(self.trainee.gpt):
                self.report.say(
                    f"warning: the routers are frozen, so that router.losses={self.config.router.losses} move only the "
                    "layers before them; router.losses.NAME=0 turns one off"
                )
            if step == 0:
                self._validate(0)
            if checkpoint is None and self.config.steps == 0:  # a run of no steps still leaves its model
                self._save(0, wait=True)
            for _ in self.steps(step):
                pass

    def reporting(self, step: int) -> Report:
        """Opens what the run writes to, beside checkpoints."""
        self.report = Report(
            self.config,
            self.model,
            self.out,
            domains=self.domains,
            resumed_at=step,
            ranks=dist.get_world_size(),
            first=self.first,
        )
        return self.report

    def steps(self, step: int) -> Iterator[StepResult]:
        """All that a step of the run is, from step number `step` to the last; one at each `next`."""
        config, data, microbatches = self.config, *self._batches(step)
        datasets = len(self.domains) if len(self.domains) > 1 else 0
        while step < config.steps:
            reset_routing(self.trainee.gpt)
            result = train_step(
                self.trainee,
                data,
                microbatches=microbatches,
                micro_batch_size=config.micro_batch_size,
                seq_length=config.data.seq_length,
                step=step,
                seed=config.seed,
                datasets=datasets,
                flags=lambda: (self.stop.asked, self.saver.writing),
            )
            step += 1
            self.hang.beat(f"step {step}")
            self._see(step, result)
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                self._validate(step)
            stop, writing = result.flags
            self.saver.poll(writing)
            if stop or step == config.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
                self._save(step, wait=stop)
            if stop and step < config.steps:
                raise Stopped(f"{self.out}: stopped on request after step {step}; the same command resumes")
            yield result

    def _batches(self, step: int) -> tuple[Iterator[dict[str, Any]], int]:
        """This rank's micro-batches from a step on, and how many of them a step has."""
        from megatron.core import parallel_state as mpu

        sizes = {
            "global_batch_size": self.config.global_batch_size,
            "micro_batch_size": self.config.micro_batch_size,
            "dp_size": mpu.get_data_parallel_world_size(),
        }
        consumed = step * self.config.global_batch_size
        data = batches(self.train_set, consumed_samples=consumed, dp_rank=mpu.get_data_parallel_rank(), **sizes)
        return data, num_microbatches(**sizes)

    def _see(self, step: int, result: StepResult) -> None:
        """Notes, tells and judges a step. Raises CheckFailed when the run has broken down."""
        spike = self.watch.see(result)
        if result.empty:
            self.report.say(f"warning: step {step} skipped: no token of its batch is a target")
        elif not result.finite:
            size = self.config.global_batch_size
            ids = batch_ids(self.train_set, self.domains, range((step - 1) * size, step * size)) if self.first else []
            self.report.skip(step, result, ids, self.watch.skipped)
        if self.watch.broken or (result.ok and not result.finite):
            self.saver.finish()
            saved = latest_checkpoint(self.out)
            raise CheckFailed(
                f"{self.out}: training broke down at step {step} (loss {result.loss}, gradient norm "
                f"{result.grad_norm}, {self.watch.skipped} steps in a row skipped or lost); the last checkpoint "
                f"({saved.name if saved else 'none'}) is as it was, the batches are in skipped_batches.jsonl; start "
                "another out from it, with a lower optim.lr or optim.clip_grad, or other data"
            )
        routing = collect_routing(self.trainee.gpt, self.model) if self.report.logs(step) else None
        self.report.step(step, result, routing, spike)

    def _validate(self, step: int) -> None:
        self.report.validation(step, validate(self.trainee, self.config, self.model, self.valid_sets))
        self.hang.beat(f"the validation of step {step}")

    def _save(self, step: int, *, wait: bool) -> None:
        last = step == self.config.steps
        progress = {"step": step, "watched": self.watch.state()}
        self.saver.save(self.trainee, progress, last=last, wait=wait or last)
        self.hang.beat(f"the checkpoint of step {step}")

    def finish(self) -> None:
        """Exports when asked, then writes DONE: a killed run that lacks it does this again. The other ranks go home."""
        if self.first:
            if self.config.export:
                for name in ("hf", "hf-ema") if self.config.ema.decay else ("hf",):
                    export = self.out / name
                    if export.exists():  # of a run that was killed between the export and DONE
                        shutil.rmtree(export)
                    self.report.say(f"{export}: {export_hf(self.out, export, ema=name == 'hf-ema')}")
            write_file(self.out / "DONE", json.dumps({"step": self.config.steps}) + "\n")
