"""Load-balancing losses as pure functions.

Shape suffixes: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def btx_load_balance(
    gates_TE: Tensor,
    logits_TE: Tensor,
    *,
    detach_u: bool = False,
    mean_over_ranks: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Branch-Train-MiX's balance loss (section 3.3) without its weight alpha: N * sum_i u_i p_i, a scalar.

    u_i is the batch mean of the gate of expert i *after* top-k, p_i that of the full softmax; the gradient flows
    through both unless `detach_u`. Switch's loss has the share of tokens, a constant, for u_i. One on uniform routing.
    `mean_over_ranks` turns this rank's [2, E] means into those of the whole micro-batch where it is split over ranks.
    """
    means_2E = torch.stack([gates_TE.mean(dim=0), logits_TE.softmax(dim=-1).mean(dim=0)])
    u_E, p_E = mean_over_ranks(means_2E)
    if detach_u:
        u_E = u_E.detach()
    return gates_TE.shape[-1] * (u_E * p_E).sum()
