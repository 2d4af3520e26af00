"""`btx-nemo demo`: seed -> three experts -> mix -> joint training -> export, with real text, on this machine."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.demo.board import Board
from btx_nemo.demo.processes import TrainProcess, run_all
from btx_nemo.demo.report import report
from btx_nemo.errors import UserError

DOMAINS = ("math", "code", "prose")
STEPS = ("data", "seed", "experts", "mix", "joint", "export", "report")


@dataclass(frozen=True)
class Size:
    """How much the demo trains."""

    data: str
    """Name of a size of `build_demo_data`."""
    seed_steps: int
    expert_steps: int
    joint_steps: int
    overrides: tuple[str, ...] = ()
    expected_seconds: tuple[int, ...] = (12, 60, 130, 5, 90, 10, 15)
    """What each of STEPS took when it was last measured on two cores, for the estimate of what is left."""


SIZES = {
    "full": Size(data="full", seed_steps=160, expert_steps=100, joint_steps=120),
    "small": Size(
        data="small",
        seed_steps=12,
        expert_steps=8,
        joint_steps=8,
        overrides=("data.seq_length=128", "eval_batches=2", "optim.warmup_steps=2", "log_every=2"),
        expected_seconds=(8, 14, 20, 5, 16, 5, 10),
    ),
}


def demo(out: Path, *, size: str = "full", until: str = "report") -> None:
    """Runs all steps up to `until` in the folder `out`; what is done there already is not done again.

    Leaves data/, seed/, expert-<domain>/, mix/, joint/, export/, logs/ and routing.png. Raises UserError for an unknown
    step, and BtxError naming the log where a training run fails.
    """
    if until not in STEPS:
        raise UserError(f"--until {until}: unknown step; known: {', '.join(STEPS)}")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; choose a folder")
    out.mkdir(parents=True, exist_ok=True)
    chosen = SIZES[size]
    work = _Demo(out, chosen)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the trainings it started end too
    with Board(dict(zip(STEPS, chosen.expected_seconds))) as board:
        for step in STEPS[: STEPS.index(until) + 1]:
            if step == "report":
                break
            with board.step(step):
                getattr(work, step)(board)
    if until == "report":
        report(out, DOMAINS, seconds=time.monotonic() - started)


class _Demo:
    """The steps, each skipped where its result is there."""

    def __init__(self, out: Path, size: Size):
        self.out, self.size = out, size
        self.cores = len(os.sched_getaffinity(0))

    def data(self, board: Board) -> None:
        """Three domains and their tokenizer."""
        from btx_nemo.data.blend import list_domains
        from btx_nemo.data.demo import build_demo_data

        folder = self.out / "data"
        if not folder.exists() or sorted(DOMAINS) != list_domains(folder):
            build_demo_data(folder, size=self.size.data)

    def seed(self, board: Board) -> None:
        """A fresh model, trained a little on everything; data parallel where there is more than one core."""
        self._train(board, [self._process("seed", "tiny_seed", self.size.seed_steps, ranks=min(self.cores, 2))])

    def experts(self, board: Board) -> None:
        """One specialist a domain, at the same time, as on a cluster."""
        start = f"init_from={self.out / 'seed'}"
        self._train(
            board,
            [
                self._process(f"expert-{d}", "tiny_expert", self.size.expert_steps, f"domain={d}", start)
                for d in DOMAINS
            ],
        )

    def mix(self, board: Board) -> None:
        """Specialists and seed become the experts of one model."""
        from btx_nemo.mix.config import MixConfig
        from btx_nemo.mix.run import run_mix

        if not (self.out / "mix").exists():
            experts = {domain: str(self.out / f"expert-{domain}" / "hf") for domain in DOMAINS}
            run_mix(MixConfig(seed=str(self.out / "seed" / "hf"), experts=experts, out=str(self.out / "mix")))

    def joint(self, board: Board) -> None:
        """The mixture learns to route; expert parallel where there is more than one core."""
        ranks = 2 if self.cores >= 2 else 1
        arguments = (f"init_from={self.out / 'mix'}", f"layout.ep={ranks}", "export=false")
        self._train(board, [self._process("joint", "tiny_mix", self.size.joint_steps, *arguments, ranks=ranks)])

    def export(self, board: Board) -> None:
        """Back to Hugging Face."""
        from btx_nemo.convert.to_hf import export_hf

        if not (self.out / "export").exists():
            export_hf(self.out / "joint", self.out / "export")

    def _process(self, name: str, config: str, steps: int, *overrides: str, ranks: int = 1) -> TrainProcess:
        data = f"data.path={self.out / 'data'}"
        every = (data, *self.size.overrides, *overrides)
        return TrainProcess(name, config, self.out / name, every, steps, ranks)

    def _train(self, board: Board, processes: list[TrainProcess]) -> None:
        open_ones = [process for process in processes if not (process.out / "DONE").exists()]
        if open_ones:
            run_all(open_ones, self.out / "logs", lambda newest: board.training(open_ones, newest))
