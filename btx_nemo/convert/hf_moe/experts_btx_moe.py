"""Router and experts of `BtxMoeForCausalLM`.

Shape suffixes: B batch, S sequence, H hidden, T = S * B tokens (by position, then by sequence), E experts, P pairs of a
token and an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from .configuration_btx_moe import BtxMoeConfig
from .routing_btx_moe import (
    capacity_of,
    domain_logits,
    expert_choice_selection,
    grouped_top_k_gates,
    hard_top1_gates,
    project_domains,
    soft_gates,
    top_k_gates,
    with_penalty,
    within_capacity,
)


class BtxMoeMLP(nn.Module):
    """W_down(silu(W_gate x) * W_up x), scaled by a token's gate before W_down, as in Megatron."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, gates_T: Tensor | None = None) -> Tensor:
        inner = silu(self.gate_proj(x)) * self.up_proj(x)
        if gates_T is not None:
            inner = (inner * gates_T[:, None]).to(inner.dtype)
        return self.down_proj(inner)


class BtxMoeRouter(nn.Module):
    """Which experts a token is sent to, and with what weight. All of it is fp32, whatever the model's dtype."""

    weight: Tensor
    penalty: Tensor
    w1: Tensor
    w2: Tensor
    domain_embeddings: Tensor

    def __init__(self, config: BtxMoeConfig, layer: int):
        super().__init__()
        self.kind, self.options = config.router, config.router_options
        self.experts, self.top_k, self.first = config.num_experts, config.num_experts_per_tok, layer == 0
        self.groups = self.options["groups"] if self.kind == "divmoe" else 1
        hidden = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.experts, hidden)}
        if self.kind == "noisy_top_k":
            shapes["noise_weight"] = (self.experts, hidden)  # of no use but in training with btx_nemo
        if self.kind == "flexolmo" and self.options.get("bias"):
            shapes["penalty"] = (self.experts - 1,)
        if self.kind == "nexus":
            size = self.options["embedding_size"]
            shapes = {"w1": (2 * hidden, size), "w2": (hidden, hidden), "domain_embeddings": (self.experts, size)}
        for name, shape in shapes.items():
            # The embeddings are constant, but no buffer: transformers 4 loads none of a layer that is put on the disk.
            trained = name != "domain_embeddings"
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=trained))
        self._cached: Tensor | None = None

    def forward(self, hidden_TH: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, gates, the selection, and what of it is carried out, all [T, E]; padding is sent nowhere."""
        with torch.autocast(hidden_TH.device.type, enabled=False):
            logits_TE = self._logits(hidden_TH.float())
            gates_TE, selected_TE = self._route(logits_TE, valid_T)
        kept_TE = selected_TE if valid_T is None else selected_TE & valid_T[:, None]
        if self.kind == "switch":
            factor = self.options.get("capacity_factor", 1.5)
            if factor:
                kept_TE = within_capacity(kept_TE, self._capacity(factor, kept_TE.shape[0], valid_T))
        return logits_TE, gates_TE, selected_TE, kept_TE

    def _logits(self, hidden_TH: Tensor) -> Tensor:
        if self.kind == "nexus":
            return domain_logits(hidden_TH, self._expert_embeddings())
        logits_TE = linear(hidden_TH, self.weight)
        return with_penalty(logits_TE, self.penalty) if hasattr(self, "penalty") else logits_TE

    def _route(self, logits_TE: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor]:
        option = self.options.get
        if self.kind == "soft" or (self.kind == "sample_top1" and self.first):
            return soft_gates(logits_TE)
        if self.kind == "sample_top1":
            hard = option("inference", "argmax") == "hard"
            noise = torch.empty_like(logits_TE).exponential_().log_().neg_() if hard else 0.0
            return hard_top1_gates(logits_TE + noise)
        if self.kind == "divmoe":
            return grouped_top_k_gates(logits_TE, self.groups, self.top_k)
        if self.kind == "expert_choice":
            probs_TE = logits_TE.softmax(dim=-1)
            scores_TE = probs_TE if valid_T is None else probs_TE - 2.0 * ~valid_T[:, None]  # padding comes last
            capacity = int(self._capacity(option("capacity_factor", 2.0), len(logits_TE), valid_T))
            selected_TE = expert_choice_selection(scores_TE, capacity)
            return probs_TE * selected_TE, selected_TE
        # Noisy top-k has no noise here; switch, nexus and flexolmo take a share of the full softmax.
        before = self.kind in ("switch", "nexus", "flexolmo") or option("softmax") == "before"
        renormalise = self.kind == "top_k" and option("renormalise", True)
        return top_k_gates(logits_TE, self.top_k, softmax_before=before, renormalise=renormalise)

    def _capacity(self, factor: float, tokens: int, valid_T: Tensor | None) -> Any:
        return capacity_of(tokens if valid_T is None else valid_T.sum().clamp(min=1), self.experts, factor)

    def _expert_embeddings(self) -> Tensor:
        if self._cached is None or self.training or torch.is_grad_enabled():
            self._cached = None
            embeddings = project_domains(self.domain_embeddings, self.w1, self.w2)
            if self.training or torch.is_grad_enabled():
                return embeddings
            self._cached = embeddings
        return self._cached

    def train(self, mode: bool = True) -> BtxMoeRouter:
        """Forgets the cached embeddings: weights may have changed."""
        self._cached = None
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._cached = None
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves between devices; a cast of the model leaves it fp32."""
        self._cached = None

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


class BtxMoeBlock(nn.Module):
    """Router, routed experts and, for some, an expert that every token passes."""

    def __init__(self, config: BtxMoeConfig, layer: int):
        super().__init__()
        hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
        self.gate = BtxMoeRouter(config, layer)
        self.experts = nn.ModuleList(BtxMoeMLP(hidden, config.intermediate_size) for _ in range(config.num_experts))
        self.shared_expert = BtxMoeMLP(hidden, shared) if shared else None
        gated = bool(shared and config.shared_expert_gate)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if gated else None

    def forward(self, hidden_BSH: Tensor, valid_BS: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, S, H], logits and selection [B * S, E]. Tokens are taken by position first, as in Megatron."""
        batch, length = hidden_BSH.shape[:2]
        hidden_TH = hidden_BSH.transpose(0, 1).flatten(0, 1)
        valid_T = None if valid_BS is None else valid_BS.T.flatten()
        logits_TE, gates_TE, selected_TE, kept_TE = self.gate(hidden_TH, valid_T)
        out_TH = self._mix(hidden_TH, gates_TE, kept_TE)
        if self.shared_expert is not None:
            shared_TH = self.shared_expert(hidden_TH)
            if self.shared_expert_gate is not None:
                shared_TH = self.shared_expert_gate(hidden_TH).sigmoid() * shared_TH
            out_TH = out_TH + shared_TH

        def by_sequence(x_TX: Tensor) -> Tensor:
            return x_TX.unflatten(0, (length, batch)).transpose(0, 1)

        return by_sequence(out_TH), by_sequence(logits_TE).flatten(0, 1), by_sequence(selected_TE).flatten(0, 1)

    def _mix(self, hidden_TH: Tensor, gates_TE: Tensor, kept_TE: Tensor) -> Tensor:
        """Sum of the experts' outputs: the tokens of all experts in one gather and one scatter, expert by expert."""
        kept_ET = kept_TE.T
        _, token_P = kept_ET.nonzero(as_tuple=True)
        counts = kept_ET.sum(dim=1).tolist()
        inputs, gates = hidden_TH[token_P].split(counts), gates_TE.T[kept_ET].split(counts)
        outputs = [
            expert(x, g)
            for expert, x, g in zip(self.experts, inputs, gates)
            if len(x) or self.training  # in training each expert has a gradient on every rank
        ]
        out_TH = torch.zeros_like(hidden_TH)
        return out_TH.index_add(0, token_P, torch.cat(outputs).to(out_TH.dtype)) if outputs else out_TH


def balance_loss(logits: tuple[Tensor, ...], selected: tuple[Tensor, ...], mask_BS: Tensor | None) -> Tensor:
    """Switch's balance loss N sum_i f_i p_i, f the share of assignments, summed over layers; L when uniform.

    transformers' own pools the layers and is k times larger for k experts a token. Padding does not count.
    """
    total = logits[0].new_zeros(())
    for logits_TE, selected_TE in zip(logits, selected):
        weight_T1 = torch.ones_like(logits_TE[:, :1]) if mask_BS is None else mask_BS.reshape(-1, 1).to(logits_TE)
        share_E = (selected_TE * weight_T1).sum(dim=0)
        probs_E = (logits_TE.softmax(dim=-1) * weight_T1).sum(dim=0) / weight_T1.sum()
        total = total + logits_TE.shape[-1] * (share_E / share_E.sum() * probs_E).sum().to(total.device)
    return total
