"""Routing rules as pure functions on logits: no module, no state, no Megatron.

Shape suffixes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_selection(logits_TE: Tensor, k: int) -> Tensor:
    """Boolean [T, E]: each token's k largest logits; ties go to the lowest index (`torch.topk` leaves them open)."""
    order_TE = logits_TE.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(-1, order_TE[:, :k], True)


def top_k_gates(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Branch-Train-MiX's Top-k gate (section 3.2): softmax over the k kept logits, zero elsewhere.

    This is Mixtral's rule too: softmax over all, then top-k, then renormalised. Returns gates [T, E] in the logits'
    dtype, which sum to one, and the boolean selection [T, E].
    """
    selected_TE = top_k_selection(logits_TE, k)
    gates_TE = logits_TE.masked_fill(~selected_TE, float("-inf")).softmax(dim=-1)
    return gates_TE, selected_TE
