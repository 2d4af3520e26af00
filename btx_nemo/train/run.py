"""A training run from its configuration to DONE: build, resume, train, validate, save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.config.load import save_resolved
from btx_nemo.config.schema import TrainConfig
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.data.blend import build_datasets, list_domains
from btx_nemo.data.sampler import batches, num_microbatches, num_validation_microbatches, validation_batches
from btx_nemo.errors import CheckFailed, Stopped, UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.parallel import parallel_state
from btx_nemo.train.checkpoint import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from btx_nemo.train.metrics import MetricsFile, TrainProgress, load_bars
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
    prepared = prepare(config)
    if (prepared.out / "DONE").exists():
        print(f"{prepared.out}: done already (remove the folder to train again)")
        return
    with parallel_state(config.layout, seed=config.seed), StopRequest() as stop:
        _Run(config, prepared, stop).go()


class _Run:
    """The state of one run on one rank."""

    def __init__(self, config: TrainConfig, prepared: Prepared, stop: StopRequest):
        from megatron.core import parallel_state as mpu

        self.config, self.prepared, self.stop = config, prepared, stop
        self.model: ModelConfig = prepared.source.model
        self.out = prepared.out
        self._load_text = ""
        self._dead: set[tuple[int, int]] = set()
        self.first = dist.get_rank() == 0
        self.dp = {"dp_rank": mpu.get_data_parallel_rank(), "dp_size": mpu.get_data_parallel_world_size()}
        self.batch = {"micro_batch_size": config.micro_batch_size}
        self.microbatches = num_microbatches(
            global_batch_size=config.global_batch_size, dp_size=self.dp["dp_size"], **self.batch
        )
        self.sizes = {"micro_batch_size": config.micro_batch_size, "seq_length": config.data.seq_length}
        self.made_out = self.first and not self.out.exists()
        if self.first:
            self.out.mkdir(parents=True, exist_ok=True)
            save_resolved(config, self.out / "resolved.yaml")
        dist.barrier()

    def go(self) -> None:
        """All of it."""
        try:
            train_set, self.valid_sets = self._datasets()
            self.trainee = build_trainee(self.config, self.prepared.source)
        except UserError:
            if self.made_out:  # what only building could find out: leave nothing that the next try has to agree with
                shutil.rmtree(self.out, ignore_errors=True)
            raise
        checkpoint = latest_checkpoint(self.out)
        step = load_checkpoint(checkpoint, self.trainee).step if checkpoint else 0
        self.metrics = MetricsFile(self.out / "metrics.jsonl", resumed_at=step) if self.first else None
        data = batches(
            train_set,
            consumed_samples=step * self.config.global_batch_size,
            global_batch_size=self.config.global_batch_size,
            **self.batch,
            **self.dp,
        )
        tokens = self.config.global_batch_size * self.config.data.seq_length
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
            if frozen_with_losses(self.trainee.gpt):
                self.bar.say(
                    f"warning: the routers are frozen, so that router.losses={self.config.router.losses} move only the "
                    "layers before them; router.losses.NAME=0 turns one off"
                )
            if step == 0:
                self._validate(0)
            self._loop(step, data)
        self._finish()

    def _datasets(self) -> tuple[Any, dict[str, Any]]:
        config = self.config
        path = Path(config.data.path)
        domains = list_domains(path)
        blend = {config.domain: 1.0} if config.domain else (config.data.blend or dict.fromkeys(domains, 1.0))
        return build_datasets(
            path,
            blend,
            seq_length=config.data.seq_length,
            train_samples=max(config.steps, 1) * config.global_batch_size,
            valid_samples=config.eval_batches * config.global_batch_size,
            seed=config.seed,
            cache_dir=self.out / "cache",
            domains_for_validation=config.data.valid or domains,
            vocab_size=self.model.vocab_size,
        )

    def _loop(self, step: int, data: Iterator[dict[str, Any]]) -> None:
        config = self.config
        reset_routing(self.trainee.gpt)
        while step < config.steps:
            result = train_step(
                self.trainee, data, microbatches=self.microbatches, step=step, seed=config.seed, **self.sizes
            )
            step += 1
            self._check_finite(step, result)
            if step % config.log_every == 0 or step == config.steps:
                self._log(step, result)
            text = f"loss {result.loss:.3f}  grad {result.grad_norm:.2f}{self._load_text}"
            self.bar.update(step, text)
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                self._validate(step)
            stopped = self.stop.agreed()
            if stopped or step == config.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
                self._save(step)
            if stopped and step < config.steps:
                raise Stopped(f"{self.out}: stopped on request after step {step}; the same command resumes")
        if latest_checkpoint(self.out) is None:  # a run of no steps still leaves its model
            self._save(step)

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
        reset_routing(self.trainee.gpt)
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "skipped": not result.ok,
            "lr": self.trainee.optimizer.param_groups[0]["lr"] if self.trainee.optimizer.param_groups else None,
            "tokens_per_second": round(self.bar.tokens_per_second(step), 1),
        }
        if routing is not None:
            record |= routing.record()
            self._load_text = f"  load {load_bars(routing.load)}"
            self._warn_of_dead(routing)
        if self.metrics:
            self.metrics.write(record)

    def _warn_of_dead(self, routing: Routing) -> None:
        """Names each expert that no token chose since the last line, once as long as it stays so."""
        names = self.model.moe.experts if self.model.moe else []
        for layer, expert in sorted(set(routing.dead) - self._dead):
            name = f" ({names[expert]})" if names else ""
            self.bar.say(f"warning: layer {layer}: expert {expert}{name} got no token since the last log line")
        self._dead = set(routing.dead)

    def _validate(self, step: int) -> None:
        config = self.config
        record: dict[str, Any] = {"step": step, "valid": {}, "routing": {}}
        samples = config.eval_batches * config.global_batch_size
        size = {**self.batch, "dp_size": self.dp["dp_size"], "num_samples": samples}
        for domain, dataset in self.valid_sets.items():
            with separate_routing(self.trainee.gpt):
                record["valid"][domain] = mean_validation_loss(
                    self.trainee,
                    validation_batches(dataset, dp_rank=self.dp["dp_rank"], **size),
                    microbatches=num_validation_microbatches(dataset, **size),
                    **self.sizes,
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
            Progress(step=step),
            self.model,
            self.prepared.tokenizer,
            self.config.checkpoint.keep,
        )

    def _finish(self) -> None:
        """Exports when asked, then writes DONE: a killed run that lacks it does this again."""
        if self.first:
            if self.config.export:
                export = self.out / "hf"
                if export.exists():  # of a run that was killed between the export and DONE
                    shutil.rmtree(export)
                export_hf(self.out, export)
            write_file(self.out / "DONE", json.dumps({"step": self.config.steps}) + "\n")
        dist.barrier()
