"""The commands of a pipeline: submit, status, logs and cancel, and those that its scripts use."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from btx_nemo.errors import UserError

Command = Callable[..., argparse.ArgumentParser]
_RUNS = "folder of all runs (default: $BTX_RUNS, else runs)"


def add_commands(command: Command) -> None:
    """Adds them; `command(name, run, text)` makes one."""
    sub = command(
        "submit",
        _submit,
        "Experts in parallel, mix, training, export: as Slurm jobs, or here. What is done is left out.",
    )
    sub.add_argument(
        "--config-name", default="pipeline", help="a file of conf/submit, without .yaml (default: pipeline)"
    )
    sub.add_argument("--config-path", help="a folder instead of conf/submit")
    sub.add_argument("--runs", type=Path, help=_RUNS)
    sub.add_argument("--dry-run", action="store_true", help="print the sbatch lines and submit nothing")
    sub.add_argument("--local", action="store_true", help="run here even where Slurm is")
    sub.add_argument("--allow-missing", action="store_true", help="mix without the experts that failed, and say so")
    sub.add_argument("--redo", action="append", default=[], metavar="STAGE", help="put it aside and make it again")
    sub.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="e.g. --sbatch=--partition=gpu")
    text = "domains to add, and overrides, e.g. math code expert.set.optim.lr=5e-5 joint.nodes=2; see launch/config.py"
    sub.add_argument("words", nargs="*", metavar="DOMAIN|KEY=VALUE", help=text)

    sub = command("status", _status, "How the stages of a pipeline are doing.")
    sub.add_argument("--runs", type=Path, help=_RUNS)
    sub.add_argument("--watch", action="store_true", help="again and again, until nothing happens any more")

    sub = command("logs", _logs, "The log of a stage; without one, where the logs are.")
    sub.add_argument("stage", nargs="?", help="e.g. expert-math, mix, joint")
    sub.add_argument("--runs", type=Path, help=_RUNS)
    sub.add_argument("--lines", type=int, default=40, help="how many of the last lines (default: 40)")
    sub.add_argument("--follow", action="store_true", help="go on as it grows")

    sub = command("cancel", _cancel, "Stop the jobs of some stages, and those that wait for them; or all.")
    sub.add_argument("stages", nargs="*", metavar="STAGE", help="e.g. expert-math (default: all)")
    sub.add_argument("--runs", type=Path, help=_RUNS)

    sub = command("stage", _stage, "Used by the scripts of slurm/: record what a stage is made of, e.g. seed=DIR.")
    sub.add_argument("runs", type=Path)
    sub.add_argument("stage")
    sub.add_argument("out", type=Path)
    sub.add_argument("inputs", nargs="*", metavar="NAME=DIR")

    sub = command(
        "losses", _losses, "Used by slurm/eval.sh: the validation losses of all runs, e.g. losses runs runs/eval."
    )
    sub.add_argument("runs", type=Path)
    sub.add_argument("out", type=Path)


def _runs(arguments: argparse.Namespace) -> Path:
    return Path(arguments.runs or os.environ.get("BTX_RUNS") or "runs").absolute()


def _submit(arguments: argparse.Namespace) -> None:
    from btx_nemo.launch.submit import submit

    submit(
        arguments.words,
        config_name=arguments.config_name,
        config_path=arguments.config_path,
        runs=arguments.runs,
        dry_run=arguments.dry_run,
        local=arguments.local,
        allow_missing=arguments.allow_missing,
        redo=arguments.redo,
        sbatch_options=arguments.sbatch,
    )


def _status(arguments: argparse.Namespace) -> None:
    from btx_nemo.launch.status import show_status

    show_status(_runs(arguments), watch=arguments.watch)


def _logs(arguments: argparse.Namespace) -> None:
    from btx_nemo.launch.logs import show_logs

    show_logs(_runs(arguments), arguments.stage, lines=arguments.lines, follow=arguments.follow)


def _cancel(arguments: argparse.Namespace) -> None:
    from btx_nemo.launch.cancel import cancel

    cancel(_runs(arguments), arguments.stages)


def _stage(arguments: argparse.Namespace) -> None:
    from btx_nemo.launch.identity import begin

    inputs = {}
    for word in arguments.inputs:
        name, equals, folder = word.partition("=")
        if not equals:
            raise UserError(f"stage: {word!r}: expected NAME=DIR")
        inputs[name] = Path(folder)
    begin(arguments.runs, arguments.stage, arguments.out, inputs, arguments.passed_on)


def _losses(arguments: argparse.Namespace) -> None:
    from btx_nemo.launch.losses import losses

    losses(arguments.runs, arguments.out)
