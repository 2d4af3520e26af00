"""Routing rules as pure functions on logits: no module, no state, no Megatron; vectorised, ties to the lowest index.

Shape suffixes: T tokens, E experts, G domain groups, M experts of a group (E = G * M), H hidden, D domain embedding.
A rule returns gates [T, E], zero where an expert is not selected, and the boolean selection [T, E]. Logits in half
precision are computed with in fp32, in which the gates then are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

NEGATIVE_INFINITY = float("-inf")


def precise(values: Tensor) -> Tensor:
    """In fp32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def softmax(logits_TE: Tensor) -> Tensor:
    """Softmax over the experts."""
    return precise(logits_TE).softmax(dim=-1)


def top_k_selection(scores_TE: Tensor, k: int) -> Tensor:
    """Boolean [T, E]: each token's k largest scores; ties go to the lowest index (`torch.topk` leaves them open)."""
    scores_TE = scores_TE.detach()
    kth_T1 = scores_TE.topk(k, dim=-1).values[:, -1:]  # a value: which of several equal ones it was does not matter
    above_TE, equal_TE = scores_TE > kth_T1, scores_TE == kth_T1
    room_T1 = k - above_TE.sum(dim=-1, keepdim=True)
    return above_TE | (equal_TE & (equal_TE.cumsum(dim=-1) <= room_T1))


def softmax_over(logits_TE: Tensor, selected_TE: Tensor) -> Tensor:
    """Softmax over the selected logits, zero elsewhere; gates sum to one."""
    return softmax(logits_TE.masked_fill(~selected_TE, NEGATIVE_INFINITY))


def top_k_gates(
    logits_TE: Tensor, k: int, *, softmax_before: bool = False, renormalise: bool = True
) -> tuple[Tensor, Tensor]:
    """Top-k gates. By default Branch-Train-MiX's (section 3.2): softmax over the k kept logits, zero elsewhere.

    That is Mixtral's rule too: softmax over all, then top-k, then renormalised. With `softmax_before` and without
    `renormalise` a gate is the expert's share of the full softmax (Switch, FlexOlmo). `softmax_before` with
    `renormalise` equals the default.
    """
    selected_TE = top_k_selection(logits_TE, k)
    if softmax_before and not renormalise:
        return softmax(logits_TE) * selected_TE, selected_TE
    return softmax_over(logits_TE, selected_TE), selected_TE


def soft_gates(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Branch-Train-MiX's Soft routing: every token to every expert, weighted by the softmax."""
    return softmax(logits_TE), torch.ones_like(logits_TE, dtype=torch.bool)


def temperature(step: int) -> float:
    """Branch-Train-MiX's schedule for Sample Top-1: max(0.5, exp(-1e-4 step)); at its floor from step 6932."""
    return max(0.5, math.exp(-1e-4 * step))


def sample_top1_gates(logits_TE: Tensor, noise_TE: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Branch-Train-MiX's Sample Top-1 in training (section 4.3.1): softmax((z + Gumbel) / tau), its largest entry kept.

    The gate is that soft value itself, neither renormalised nor straight-through, and one expert is computed.
    """
    noisy_TE = precise(logits_TE) + noise_TE
    selected_TE = top_k_selection(noisy_TE, 1)  # the softmax would round near values to the same
    return softmax(noisy_TE / tau) * selected_TE, selected_TE


def hard_top1_gates(scores_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Weight one on the largest score: Sample Top-1 at inference, on noisy logits (hard) or clean ones (argmax)."""
    selected_TE = top_k_selection(scores_TE, 1)
    return selected_TE.to(scores_TE.dtype), selected_TE


def noisy_logits(clean_TE: Tensor, noise_logits_TE: Tensor, epsilon_TE: Tensor) -> Tensor:
    """Shazeer et al. 2017, equation 4: H = x W_g + epsilon * softplus(x W_noise), epsilon ~ N(0, 1)."""
    return precise(clean_TE) + epsilon_TE * torch.nn.functional.softplus(precise(noise_logits_TE))


def grouped_top_k_gates(logits_TE: Tensor, groups: int, k: int) -> tuple[Tensor, Tensor]:
    """DivMoE's Algorithm 1: the best expert of each domain group, the k best groups, softmax over these k.

    Experts lie group by group (expert i * M + j is slice j of domain i), so at most one of a group is selected.
    Megatron's group-limited routing is another rule: it takes several experts of a group.
    """
    tokens, experts = logits_TE.shape
    logits_TGM = logits_TE.view(tokens, groups, experts // groups)
    best_TGM = top_k_selection(logits_TGM.flatten(0, 1), 1).view_as(logits_TGM)
    chosen_TG = top_k_selection(logits_TGM.amax(dim=-1), k)
    selected_TE = (best_TGM & chosen_TG[..., None]).view(tokens, experts)
    return softmax_over(logits_TE, selected_TE), selected_TE


def project_domains(domain_ND: Tensor, w1_2HD: Tensor, w2_HH: Tensor) -> Tensor:
    """Nexus, section 3.1: expert embeddings P_r(d) = W_2 SwiGLU(W_1 d), silu on the first half; [N, H].

    To the bit the same when domains are added.
    """

    def project(block_D: Tensor) -> Tensor:
        first, second = (block_D @ w1_2HD.T).chunk(2, dim=-1)
        return (silu(first) * second) @ w2_HH.T

    return torch.cat([project(block) for block in blocks_of_rows(domain_ND)])[: domain_ND.shape[0]]


def blocks_of_rows(rows_NX: Tensor) -> list[Tensor]:
    """Rows 0-15, 16-63, 64-127, 128-191, ..., padded with zeros. Products of these blocks have the same shapes, and so
    round alike, before and after a row is added.
    """
    count = rows_NX.shape[0]
    sizes = [16] if count <= 16 else [16, 48, *[64] * math.ceil((count - 64) / 64)]
    return list(torch.nn.functional.pad(rows_NX, (0, 0, 0, sum(sizes) - count)).split(sizes))


class _BlockProduct(torch.autograd.Function):
    """x @ rows^T block by block; the gradients, which need not be the same to the bit, as one product each."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, rows_NH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, rows_NH)
        return torch.cat([x_TH @ block.T for block in blocks_of_rows(rows_NH)], dim=-1)[:, : rows_NH.shape[0]]

    @staticmethod
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_TH, rows_NH = ctx.saved_tensors
        return gradient_TN @ rows_NH, gradient_TN.T @ x_TH


def domain_logits(hidden_TH: Tensor, embeddings_NH: Tensor) -> Tensor:
    """Nexus's logits x . e_i, to the bit the same when experts are added."""
    return _BlockProduct.apply(hidden_TH, embeddings_NH)


def with_penalty(logits_TE: Tensor, bias_X: Tensor) -> Tensor:
    """FlexOlmo, section 3.2: min(b_i, 0) on the logits of experts 1, 2, ...; expert 0, the public one, has none."""
    # The value of the minimum, the gradient of the bias: torch versions disagree on that of clamp at zero, the start.
    bias_X = bias_X + (bias_X.clamp(max=0) - bias_X).detach()
    return logits_TE + torch.nn.functional.pad(bias_X, (1, 0))


def expert_choice_gates(logits_TE: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Expert choice (Zhou et al. 2022; Sparse Upcycling): each expert takes its `capacity` tokens of largest softmax.

    A token's expert depends on the tokens after it, so this is no rule for causal decoding.
    """
    probs_TE = softmax(logits_TE)
    selected_TE = expert_choice_selection(probs_TE, capacity)
    return probs_TE * selected_TE, selected_TE


def expert_choice_selection(scores_TE: Tensor, capacity: int) -> Tensor:
    """Boolean [T, E]: each expert's `capacity` tokens of largest score; ties go to the earliest token."""
    return top_k_selection(scores_TE.T.contiguous(), min(capacity, scores_TE.shape[0])).T


def capacity_of(tokens: Tensor | int, experts: int, factor: float) -> Any:
    """Tokens that an expert takes at most: ceil(tokens / experts * factor) (Switch, section 2.2).

    `tokens` may be a count on the device, and so is the result then: nothing waits for it.
    """
    if isinstance(tokens, Tensor):
        return (tokens * factor / experts).ceil().long()
    return math.ceil(tokens * factor / experts)


def within_capacity(selected_TE: Tensor, capacity: Tensor | int, taken_E: Tensor | None = None) -> Tensor:
    """The selection without overflow: an expert keeps its first `capacity` tokens in order of position.

    `taken_E` counts the tokens that earlier ranks sent to each expert, where a micro-batch is split over ranks.
    """
    place_TE = selected_TE.to(torch.int64).cumsum(dim=0)
    if taken_E is not None:
        place_TE = place_TE + taken_E
    return selected_TE & (place_TE <= capacity)
