"""What a run says of itself while it trains: metrics.jsonl, trackers, the progress line, warnings."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any

from btx_nemo.config.schema import TrainConfig
from btx_nemo.families.config import ModelConfig
from btx_nemo.train.metrics import MetricsFile, TrainProgress, routing_text
from btx_nemo.train.routing import Routing
from btx_nemo.train.step import StepResult
from btx_nemo.train.throughput import Throughput
from btx_nemo.train.track import Trackers


class Report:
    """Of one run, from step `resumed_at` on; only the first rank writes and speaks.

    `domains` are the training blend's, in its order.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: ModelConfig,
        out: Path,
        *,
        domains: list[str],
        resumed_at: int,
        ranks: int,
        first: bool,
    ):
        self.config, self.model, self.domains, self.first = config, model, domains, first
        self.throughput = Throughput(config, model, ranks)
        self._routing_text = ""
        self._dead: set[tuple[int, int]] = set()
        self.bar = TrainProgress(
            total=config.steps,
            done=resumed_at,
            name=config.domain or config.stage,
            tokens_per_step=config.global_batch_size * config.data.seq_length,
            show=first,
            every=config.log_every,
        )
        self.say = self.bar.say
        if first:
            self.metrics = MetricsFile(out / "metrics.jsonl", resumed_at=resumed_at)
            self.skipped = MetricsFile(out / "skipped_batches.jsonl", resumed_at=resumed_at)
            self.trackers = Trackers(config, out, resumed_at=resumed_at, warn=self.say)

    def __enter__(self) -> Report:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.__exit__(kind, error, trace)
        if self.first:
            self.trackers.close()

    def logs(self, step: int) -> bool:
        """Whether a step gets a line in metrics.jsonl."""
        return step % self.config.log_every == 0 or step == self.config.steps

    def step(self, step: int, result: StepResult, routing: Routing | None, spike: float | None) -> None:
        """A step that was trained, or skipped. `routing` is that of a step that `logs`."""
        if routing is not None:
            text = routing_text(routing.load, routing.entropy, routing.dropped, len(routing.dead))
            self._routing_text = f"  {text}"
            self._warn_of_dead(routing)
        if spike is not None:
            self.say(f"warning: step {step}: loss {result.loss:.3f} is a spike, {spike:.0f} deviations above the last")
        if self.first and self.logs(step):
            self._write(self._record(step, result, routing))
        if self.first and spike is not None:
            self._write({"step": step, "spike": {"loss": result.loss, "zscore": round(spike, 2)}})
        self.bar.update(step, f"loss {result.loss:.3f}  grad {result.grad_norm:.2f}{self._routing_text}")

    def _record(self, step: int, result: StepResult, routing: Routing | None) -> dict[str, Any]:
        speed = self.bar.tokens_per_second(step)
        record: dict[str, Any] = {
            "step": step,
            "loss": finite(result.loss),
            "grad_norm": finite(result.grad_norm),
            "skipped": not result.ok,
            "lr": result.lr,
            "tokens_per_second": round(speed, 1),
            **self.throughput.record(speed),
        }
        if result.dataset_losses:
            record["domain_loss"] = {self.domains[i]: finite(loss) for i, loss in result.dataset_losses.items()}
        return record | (routing.record() if routing is not None else {})

    def _warn_of_dead(self, routing: Routing) -> None:
        """Names each expert that no token chose in this step, once as long as it stays so."""
        names = self.model.moe.experts if self.model.moe else []
        for layer, expert in sorted(set(routing.dead) - self._dead):
            name = f" ({names[expert]})" if names else ""
            self.say(f"warning: layer {layer}: expert {expert}{name} got no token in this step")
        self._dead = set(routing.dead)

    def skip(self, step: int, result: StepResult, batch: list[dict[str, Any]], in_a_row: int) -> None:
        """A step without a finite loss or gradient, and what its batch was."""
        if self.first:
            facts = {"loss": str(result.loss), "grad_norm": str(result.grad_norm)}
            self.skipped.write({"step": step, **facts, "samples": batch})
        self.say(
            f"warning: step {step} skipped, {in_a_row} in a row: loss {result.loss}, gradient norm {result.grad_norm}; "
            "its batch is in skipped_batches.jsonl"
        )

    def validation(self, step: int, record: dict[str, Any]) -> None:
        """Losses of the domains."""
        if self.first:
            self._write({"step": step, **record})
        losses = "  ".join(f"{domain} {loss:.4f}" for domain, loss in record["valid"].items())
        self.say(f"step {step}: validation loss  {losses}")
        if not all(map(math.isfinite, record["valid"].values())):
            self.say(f"warning: step {step}: a validation loss is not finite; look at the weights before they are used")

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        self.trackers.write(record)


def finite(number: float) -> float | None:
    """None for what JSON has no number for."""
    return number if math.isfinite(number) else None
