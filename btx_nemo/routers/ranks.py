"""What the ranks of a group hold, in the order of the ranks; of constants, no gradient flows.

Sequence parallelism gives the ranks that share a micro-batch successive parts of its sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(values: Tensor, group: Any) -> list[Tensor]:
    """Every rank's values, which have one shape. Collective."""
    if group.size() == 1:
        return [values]
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return parts


def sum_of_earlier(values: Tensor, group: Any) -> Tensor:
    """The sum of the values of the ranks before this one; zero on the first. Collective."""
    return torch.stack([torch.zeros_like(values), *gather(values, group)[: group.rank()]]).sum(dim=0)
