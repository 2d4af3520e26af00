"""Balance losses as pure functions of one router's decisions on a micro-batch, each without its weight.

All are made of means over tokens, so each works unchanged on a micro-batch that is split over ranks or padded: `mean`
knows how. Gradients flow through `mean`; counts carry none.

Shape suffixes: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from btx_nemo.errors import UserError
from btx_nemo.routers.functional import precise, softmax


def plain_mean(values_TX: Tensor) -> Tensor:
    """Mean over the tokens of this process: [T, X] -> [X]."""
    return values_TX.mean(dim=0)


@dataclass(frozen=True)
class Decision:
    """What a router decided for the tokens of a micro-batch, before any is dropped."""

    logits_TE: Tensor
    """Router logits; where the rule adds noise, with it."""
    gates_TE: Tensor
    """Weights of the combination, zero where not selected; losses are computed in their dtype."""
    selected_TE: Tensor
    """Boolean selection."""
    top_k: int
    """Experts per token."""
    mean: Callable[[Tensor], Tensor] = plain_mean
    """[T, X] -> [X]: mean over all valid tokens of the micro-batch, on all ranks that share it."""
    sequences: int = 1
    """Sequences of the micro-batch, B; token t is of sequence t mod B, as in a flattened [S, B]."""
    global_load_E: Tensor | None = None
    """Assignments per token, averaged over the data-parallel ranks and the micro-batches of the step so far."""
    clean_TE: Tensor | None = None
    """Logits without noise (noisy top-k)."""
    noise_scale_TE: Tensor | None = None
    """Standard deviation of the noise on each logit (noisy top-k)."""

    @property
    def experts(self) -> int:
        """E."""
        return self.logits_TE.shape[-1]


def btx(d: Decision, *, detach_u: bool = False) -> Tensor:
    """Branch-Train-MiX, section 3.3: N sum_i u_i p_i, u_i the mean gate after top-k, p_i the mean full softmax.

    The gradient flows through both unless `detach_u`. One on uniform routing.
    """
    u_E, p_E = d.mean(torch.cat([d.gates_TE, softmax(d.logits_TE)], dim=-1)).chunk(2)
    return d.experts * ((u_E.detach() if detach_u else u_E) * p_E).sum()


def _counts_and_probabilities(d: Decision) -> tuple[Tensor, Tensor]:
    share_TE = d.selected_TE.to(d.gates_TE.dtype)
    f_E, p_E = d.mean(torch.cat([share_TE, softmax(d.logits_TE)], dim=-1)).chunk(2)
    return f_E.detach(), p_E


def switch(d: Decision) -> Tensor:
    """Switch Transformer, section 2.2: N sum_i f_i p_i, f_i the share of assignments, a constant. One when uniform."""
    f_E, p_E = _counts_and_probabilities(d)
    return d.experts * (f_E / d.top_k * p_E).sum()


def hf(d: Decision) -> Tensor:
    """Hugging Face's scale, per layer: f_i counts assignments per token, so it is top_k times `switch`."""
    f_E, p_E = _counts_and_probabilities(d)
    return d.experts * (f_E * p_E).sum()


def switch_seq(d: Decision) -> Tensor:
    """`switch` of each sequence by itself, averaged over the sequences (Megatron's seq_aux_loss)."""
    of_TB = torch.arange(d.logits_TE.shape[0], device=d.logits_TE.device)[:, None] % d.sequences
    of_TB = (of_TB == torch.arange(d.sequences, device=of_TB.device)).to(d.gates_TE.dtype)
    both_TX = torch.cat([d.selected_TE.to(d.gates_TE.dtype), softmax(d.logits_TE)], dim=-1)
    sums_BX = d.mean((of_TB[:, :, None] * both_TX[:, None, :]).flatten(1)).view(d.sequences, -1)
    share_B1 = d.mean(of_TB)[:, None]  # of the valid tokens; none where a sequence is all padding
    f_BE, p_BE = (sums_BX / share_B1.clamp(min=torch.finfo(sums_BX.dtype).tiny)).chunk(2, dim=-1)
    return d.experts / d.top_k * (f_BE.detach() * p_BE).sum() / (share_B1 > 0).sum()


def switch_global(d: Decision) -> Tensor:
    """`switch` with the counts of the global batch so far (Megatron's global_aux_loss; Qiu et al. 2025)."""
    f_E, p_E = _counts_and_probabilities(d)
    f_E = f_E if d.global_load_E is None else d.global_load_E
    return d.experts * (f_E / d.top_k * p_E).sum()


def z(d: Decision) -> Tensor:
    """Router z-loss (ST-MoE, equation 5): mean squared log-sum-exp of the logits."""
    return d.mean(precise(d.logits_TE).logsumexp(dim=-1, keepdim=True).square()).sum()


def _squared_cv(x_E: Tensor) -> Tensor:
    """Squared coefficient of variation, population variance."""
    return x_E.var(unbiased=False) / x_E.mean().square()


def importance(d: Decision) -> Tensor:
    """Shazeer et al. 2017, equation 7: CV^2 over experts of the summed gates (the sum's scale drops out)."""
    return _squared_cv(d.mean(d.gates_TE))


def load(d: Decision) -> Tensor:
    """Shazeer et al. 2017, appendix A: CV^2 of the smooth load, the chance that fresh noise would select an expert."""
    return _squared_cv(d.mean(selection_probability(d)))


def selection_probability(d: Decision) -> Tensor:
    """P(x, i) [T, E] = Phi((clean_i - k-th largest noisy logit of the others) / noise scale_i). Needs top_k < N."""
    if d.clean_TE is None or d.noise_scale_TE is None:
        raise ValueError("the load loss needs a router with noise (noisy_top_k)")
    if d.top_k >= d.experts:
        raise ValueError(f"the load loss needs top_k < experts, not {d.top_k} of {d.experts}")
    top_TK = d.logits_TE.topk(d.top_k + 1, dim=-1).values
    # Without a selected expert the k-th largest of the others is the (k+1)-th of all; without another, the k-th.
    threshold_TE = torch.where(d.selected_TE, top_TK[:, d.top_k :], top_TK[:, d.top_k - 1 : d.top_k])
    return torch.special.ndtr((d.clean_TE - threshold_TE) / d.noise_scale_TE)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "btx": btx,
    "switch": switch,
    "hf": hf,
    "switch_seq": switch_seq,
    "switch_global": switch_global,
    "z": z,
    "importance": importance,
    "load": load,
}
"""Losses by the names that `router.losses` takes."""


def check_loss_names(names: Iterable[str]) -> None:
    """Raise UserError, listing the known ones, for a loss that there is not."""
    for name in names:
        if name not in LOSSES:
            raise UserError(f"router.losses.{name}: no such loss; known: {', '.join(LOSSES)}")
