"""Which parameters a run trains: patterns over their names."""

from __future__ import annotations

import fnmatch

import torch
import torch.distributed as dist

from btx_nemo.errors import UserError


def freeze(model: torch.nn.Module, patterns: list[str]) -> list[str]:
    """Turns gradients off for every parameter that a pattern matches; returns their names on this rank.

    Call before the model is wrapped, so that frozen parameters get no gradient buffer, no optimizer state and no weight
    decay. Raises UserError for a pattern that matches nothing on any rank, and when nothing at all would train.
    """
    names = dict(model.named_parameters())
    hits = torch.tensor([len(fnmatch.filter(names, pattern)) for pattern in patterns], dtype=torch.int64)
    frozen = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    left = torch.tensor(len(names) - len(frozen))
    for count in (hits, left):
        if count.numel():
            dist.all_reduce(count)
    for pattern, count in zip(patterns, hits.tolist()):
        if count == 0:
            raise UserError(f"freeze: {pattern!r} matches no parameter; names look like {next(iter(names))!r}")
    if left.item() == 0:
        raise UserError(f"freeze: {patterns} leaves nothing to train; drop a pattern")
    for name in frozen:
        names[name].requires_grad_(False)
    return frozen
