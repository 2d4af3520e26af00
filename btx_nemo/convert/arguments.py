"""The command lines of `btx-nemo import`, `export` and `verify`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from btx_nemo.errors import UserError
from btx_nemo.startup import kept_imports

_COMMON = (
    "dtype=DTYPE: cast to float32, bfloat16 or float16; verify=false, tensors or logits: compare the result with its "
    "source not at all, without logits, or with them however large (default: if small)"
)
_IMPORT = (
    "in=DIR and out=DIR; allow_bin=true: read pytorch_model.bin, a pickle, as weights alone; experts=stacked or apart: "
    "one key for all experts of a layer (default) or one each (in may then be a checkpoint, spelled anew); "
)
_EXPORT = (
    "in=DIR and out=DIR; target=MODEL_TYPE: this Hugging Face architecture, refused when it does not compute the same "
    "unless allow_inexact=true; shard_size=BYTES: largest file; ema=true: the averages that ema.decay kept; "
)


def add_conversions(command: Callable) -> None:
    """Adds import and export."""
    sub = command("import", _import, "Hugging Face folder -> Megatron distributed checkpoint: in=HF out=DIR")
    sub.add_argument("assignments", nargs="+", metavar="KEY=VALUE", help=_IMPORT + _COMMON)
    _add_flag(sub, "verify=false", "--no-verify")
    sub = command("export", _export, "Megatron checkpoint or run directory -> Hugging Face folder: in=CKPT out=HF")
    sub.add_argument("assignments", nargs="+", metavar="KEY=VALUE", help=_EXPORT + _COMMON)
    _add_flag(sub, "verify=false", "--no-verify")
    _add_flag(sub, "allow_inexact=true", "--allow-inexact")
    _add_flag(sub, "ema=true", "--ema", ": the averages of the weights in place of these")
    text, same = "the same as target=MODEL_TYPE", "target={}".format
    sub.add_argument("--target", dest="flags", action="append", type=same, metavar="MODEL_TYPE", help=text)


def _add_flag(sub: argparse.ArgumentParser, assignment: str, flag: str, what: str = "") -> None:
    text = f"the same as {assignment}{what}"
    sub.add_argument(flag, dest="flags", action="append_const", const=assignment, help=text)


def add_verify(command: Callable) -> None:
    """Adds verify."""
    sub = command("verify", _verify, "Compare two checkpoints' logits on the same tokens; exit 1 when they differ.")
    sub.add_argument("a", type=Path, help="Hugging Face folder, checkpoint or run directory")
    sub.add_argument("b", type=Path, help="the same")
    sub.add_argument(
        "--tolerance", type=float, help="largest absolute difference (default 1e-4, or 1e-5 of the largest logit)"
    )


def _assignments(arguments: argparse.Namespace, **optional: Callable[[str], Any]) -> tuple[Path, Path, dict[str, Any]]:
    """(in, out, options) of `in=DIR out=DIR key=value...`, each option through the function that reads it."""
    assignments = [*arguments.assignments, *(arguments.flags or ())]
    given = " ".join(assignments)
    values: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not value:
            raise UserError(f"expected in=DIR out=DIR, got {given}")
        if key not in ("in", "out", *optional):
            raise UserError(f"unknown key {key}; known: {', '.join(('in', 'out', *optional))}")
        if key in values:
            raise UserError(f"{key} is given twice, {values[key]} and {value}; give it once")
        values[key] = value
    if not {"in", "out"} <= values.keys():
        raise UserError(f"expected in=DIR out=DIR, got {given}")
    options = {key: read(values[key]) for key, read in optional.items() if key in values}
    return Path(values["in"]), Path(values["out"]), options


def _bytes(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"shard_size={value}: must be a positive number of bytes") from None


def _flag(key: str) -> Callable[[str], bool]:
    def read(value: str) -> bool:
        if value not in ("true", "false"):
            raise UserError(f"{key}={value}: must be true or false")
        return value == "true"

    return read


def _import(arguments: argparse.Namespace) -> None:
    with kept_imports():
        from btx_nemo.convert.to_megatron import import_hf

    source, out, options = _assignments(arguments, dtype=str, verify=str, allow_bin=_flag("allow_bin"), experts=str)
    print(f"{out}: {import_hf(source, out, **{'verify': 'true', **options})}")


def _export(arguments: argparse.Namespace) -> None:
    with kept_imports():
        from btx_nemo.convert.to_hf import export_hf

    source, out, options = _assignments(
        arguments,
        dtype=str,
        verify=str,
        shard_size=_bytes,
        target=str,
        allow_inexact=_flag("allow_inexact"),
        ema=_flag("ema"),
    )
    print(f"{out}: {export_hf(source, out, **{'verify': 'true', **options})}")


def _verify(arguments: argparse.Namespace) -> None:
    with kept_imports():
        from btx_nemo.convert.verify import verify

    verify(arguments.a, arguments.b, tolerance=arguments.tolerance)
