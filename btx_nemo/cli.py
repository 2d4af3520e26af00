"""The command line: one function per command, errors in one line, exit codes that scripts can trust.

0 done; 1 a check said no; 2 the user's input is wrong; 3 the environment lacks something; 75 stopped early, resumable.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from btx_nemo import __version__
from btx_nemo.convert.arguments import add_conversions, add_verify
from btx_nemo.data.arguments import add_prepare_data
from btx_nemo.embed.arguments import add_embed
from btx_nemo.errors import BtxError, EnvironmentLacks, RankFailed, Stopped, UserError
from btx_nemo.estimate.arguments import add_plan
from btx_nemo.launch.cli import add_commands as add_launch_commands
from btx_nemo.startup import kept_imports

_CONFIG_HELP = "Overrides in Hydra's grammar, e.g. layout.tp=2 optim.lr=3e-4; see conf/{0} and btx_nemo/{1}."
_ALONE_SECONDS = 5.0
_FOLDERS = ("BTX_RUNS", "BTX_SEED", "BTX_ANCHOR", "BTX_DATA", "BTX_CHATS")
_PLACES = (
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
)
"""Errors of the operating system that are about a path the user gave, not about our code."""


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for name in _FOLDERS:  # an empty one is none to the job scripts; here it would be the current folder, or /
        if os.environ.get(name) == "":
            del os.environ[name]
    parser = _parser()
    ours, passed_on = arguments, []
    if "--" in arguments and arguments[:1] == ["stage"]:  # argparse would take what follows for flags
        cut = arguments.index("--")
        ours, passed_on = arguments[:cut], arguments[cut + 1 :]
    parsed, rest = parser.parse_known_args(ours, argparse.Namespace(passed_on=passed_on))
    if rest and (parsed.command != "submit" or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes words on one side of the flags only
        parsed.words += rest
    if not parsed.debug:
        _quiet()
    try:
        parsed.run(parsed)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BtxError as error:
        if parsed.debug:
            raise
        _tell_script(error.exit_code)
        _say_once(f"btx-nemo {parsed.command}: {' '.join(str(error).split())}", error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"btx-nemo {parsed.command}: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a place that cannot be read or written, wherever it was met
        if parsed.debug or error.errno not in _PLACES:
            raise
        _tell_script(UserError.exit_code)
        _say_once(
            f"btx-nemo {parsed.command}: {str(error.filename or 'output')[:200]}: {os.strerror(error.errno).lower()}; "
            "choose another place, or mend this one",
            error,
        )
        sys.exit(UserError.exit_code)


def _tell_script(code: int) -> None:
    """Leaves an empty file where a job script asks for one: the same again would end with this code (2 or 3) again.

    torchrun, which is between them, ends with 1 whatever its ranks end with. On a full disk there is still room for it.
    """
    place = os.environ.get("_BTX_REFUSED")
    if place and code in (UserError.exit_code, EnvironmentLacks.exit_code):
        with contextlib.suppress(OSError):
            Path(place).touch()


def _say_once(line: str, error: Exception) -> None:
    """Prints an error that all ranks of a job met, once.

    The first rank speaks. When it goes down the launcher ends the others; one that is still here after a while met the
    error alone (a folder missing on its node, say), and then says so.
    """
    rank = int(os.environ.get("RANK", "0"))
    if isinstance(error, RankFailed):
        if not error.first:
            return
    elif rank:
        if isinstance(error, Stopped):
            return
        time.sleep(_ALONE_SECONDS)
        line = f"{line} (rank {rank})"
    print(line, file=sys.stderr, flush=True)


def _quiet() -> None:
    """Hides what Megatron and torch say of themselves on a machine without a GPU; --debug shows it."""
    for logger in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    for module in (r"megatron\..*", r"torch\.distributed\..*", r"btx_nemo\.megatron\.platform"):
        warnings.filterwarnings("ignore", module=module)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="btx-nemo",
        description="Dense language models trained apart, made into one mixture of experts, on Megatron-Core.",
        epilog="The whole way, small, on this machine: btx-nemo demo. Exit codes: 0 done, 1 a check said no, 2 wrong "
        "input, 3 something is not installed, 75 stopped early (run again to resume).",
    )
    parser.add_argument("--version", action="version", version=f"btx-nemo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--debug", action="store_true", help="show a traceback where an error ends the command")
        sub.set_defaults(run=run)
        return sub

    command("doctor", _doctor, "What this installation can do, and what each missing part costs.")
    add_prepare_data(command)
    add_embed(command)
    sub = command("train", _train, "Train a dense specialist or a mixture.")
    _add_configuration(sub, "train", "config/schema.py", dry_run="check all, print what would run, and end")
    sub = command("mix", _mix, "Assemble dense models into a mixture of experts.")
    _add_configuration(sub, "mix", "mix/config.py", dry_run="print the plan and read no tensor")
    add_conversions(command)
    sub = command("inspect", _inspect, "What a checkpoint is: family, parameters, experts and their origin.")
    sub.add_argument("folder", type=Path)
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument(
        "--checksums",
        action="store_true",
        help="compare every file's SHA-256 with the manifest's, which training checkpoints have",
    )
    add_verify(command)
    add_launch_commands(command)
    add_plan(command)
    sub = command("plot", _plot, "Curves of one or several runs: losses, gradient norm, speed.")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    sub.add_argument("--out", type=Path, default=Path("curves.png"), help="figure (default: curves.png)")
    sub = command("demo", _demo, "The whole pipeline, small, on this machine, with real text.")
    sub.add_argument("--out", type=Path, default=Path("runs"), help="folder for all it makes (default: runs)")
    sub.add_argument("--size", choices=("full", "small"), default="full", help="small: a quick check of every step")
    sub.add_argument("--until", default="report", help="stop after this step: data, seed, experts, mix, joint, export")
    return parser


def _add_configuration(sub: argparse.ArgumentParser, name: str, schema: str, *, dry_run: str) -> None:
    """What a command takes whose settings are a file of conf/."""
    sub.add_argument("--config-name", required=True, help=f"a file of conf/{name}, without .yaml")
    sub.add_argument("--config-path", help=f"a folder instead of conf/{name}")
    sub.add_argument("--dry-run", action="store_true", help=dry_run)
    sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_CONFIG_HELP.format(name, schema))


def _train(arguments: argparse.Namespace) -> None:
    from btx_nemo.config.load import load
    from btx_nemo.config.training import read_train_config

    values = load("train", arguments.config_name, arguments.overrides, arguments.config_path)
    config = read_train_config(values, f"train/{arguments.config_name}.yaml")
    if arguments.dry_run:
        from btx_nemo.train.dry_run import dry_run

        dry_run(config)
        return
    with kept_imports():
        from btx_nemo.train.run import train

    train(config)


def _mix(arguments: argparse.Namespace) -> None:
    with kept_imports():
        from btx_nemo.config.load import load
        from btx_nemo.mix.config import check_given_once, read_config
        from btx_nemo.mix.run import run_mix

    check_given_once(arguments.overrides)
    values = load("mix", arguments.config_name, arguments.overrides, arguments.config_path)
    run_mix(read_config(values, f"mix/{arguments.config_name}.yaml"), dry_run=arguments.dry_run)


def _inspect(arguments: argparse.Namespace) -> None:
    import json

    from btx_nemo.checkpoints.inspect import inspect_checkpoint, print_inspection

    facts: dict[str, Any] = inspect_checkpoint(arguments.folder, checksums=arguments.checksums)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print_inspection(facts)


def _plot(arguments: argparse.Namespace) -> None:
    from btx_nemo.analysis.curves import plot

    plot(arguments.runs, arguments.out)


def _doctor(arguments: argparse.Namespace) -> None:
    from btx_nemo.doctor import doctor

    doctor()


def _demo(arguments: argparse.Namespace) -> None:
    from btx_nemo.demo.run import demo

    demo(arguments.out, size=arguments.size, until=arguments.until)
