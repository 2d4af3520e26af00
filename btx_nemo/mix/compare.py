"""Comparing tensors of lazily read sources bit by bit, in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from btx_nemo.errors import UserError
from btx_nemo.families.source import Source
from btx_nemo.plan.evaluate import TensorReader, evaluate
from btx_nemo.plan.expr import Expr, describe, infer, substitute, takes
from btx_nemo.plan.layout import row_blocks

BLOCK_BYTES = 4 << 20


def lowered(expr: Expr, sources: Sequence[Source]) -> Expr:
    """An expression over shared names as one over what the sources store."""
    for source in sources:
        expr = substitute(expr, source.name, source.table)
    return expr


def equal(a: Expr, b: Expr, sources: Sequence[Source], readers: Mapping[str, TensorReader]) -> bool:
    """Whether two expressions over shared names have the same dtype, shape and bits; stops at the first difference."""
    parts = [lowered(expr, sources) for expr in (a, b)]
    if parts[0] == parts[1]:
        return True
    layouts = {name: reader.layout() for name, reader in readers.items()}
    info, other = (infer(part, layouts) for part in parts)
    if info != other:
        return False
    for box in row_blocks(info, BLOCK_BYTES):
        values = [evaluate(part, readers, info, "", 0, box).view(torch.uint8) for part in parts]
        if not torch.equal(*values):
            return False
    return True


def check_same(
    pairs: Sequence[tuple[Expr, Expr, str]], sources: Sequence[Source], readers: Mapping[str, TensorReader]
) -> None:
    """Raise UserError naming the folders and the tensor at the first pair whose bits differ."""
    folders = {source.name: str(source.folder) for source in sources}
    for a, b, meaning in pairs:
        if not equal(a, b, sources, readers):
            where, other = (folders.get(source, source) for source in (next(iter(takes(e))).source for e in (a, b)))
            raise UserError(f"{where}: {describe(a)} is not bit-identical to {describe(b)} of {other}; {meaning}")
