"""Mixtures as their inference alone sees them: the same function with a simpler router, which trains differently.

Nexus's router (2408.15901, section 3.1) is a linear one whose rows are the projected domain embeddings; FlexOlmo's
without a bias is a share of the full softmax; a shared expert without a gate is one whose sigmoid gate is fixed at one
half and whose output is doubled. Nothing of that can be undone: what is written so comes back as the simpler model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from btx_nemo.families import base as families
from btx_nemo.families import names
from btx_nemo.families.architecture import SHARED
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.families.mixture_form import SHARE_OF_ALL
from btx_nemo.plan.expr import Combine, Expr, Full, SwiGLU, Take
from btx_nemo.plan.layout import TensorInfo


@dataclass(frozen=True)
class InferenceForm:
    """A simpler model that computes the same."""

    model: ModelConfig
    tensors: dict[str, Expr]
    """Its tensors by their shared names, over those of the original (`SHARED`)."""
    how: str
    """What was made simpler, and what that costs whoever trains it."""
    computed: bool
    """Whether a router's weights are computed: they are fp32, and a narrower dtype would round them."""


def inference_form(model: ModelConfig, dtype: str) -> InferenceForm | None:
    """The simpler form of a mixture in `dtype`; None where it has none."""
    if model.moe is None:
        return None
    moe, how = model.moe, []
    if moe.router == "nexus":
        how.append("its domain embeddings projected into the rows of a linear router (trains on as one, not as Nexus)")
    elif moe.router == "flexolmo" and not moe.options.get("bias"):
        how.append("moe.router=flexolmo as the share of the softmax that it is (trains on with no row frozen)")
    ungated = bool(moe.shared_expert_intermediate_size) and not moe.shared_expert_gate
    if ungated:
        how.append("its shared expert doubled behind a gate of one half (trains on with the gate)")
    if not how:
        return None
    nexus = moe.router == "nexus"
    simpler = dataclasses.replace(model, moe=_simpler(moe, ungated))
    tensors: dict[str, Expr] = {name: Take(SHARED, name) for name in families.layout(simpler, dtype)}
    for layer in filter(model.is_mixture, range(model.num_layers)):
        if nexus:
            parts = (Take(SHARED, names.router(layer, part)) for part in ("domain_embeddings", "w1", "w2"))
            tensors[names.router(layer)] = SwiGLU(*parts)
        if ungated:
            down = names.shared_expert(layer, "down")
            tensors[down] = Combine((Take(SHARED, down),), (2.0,))
            tensors[names.shared_expert_gate(layer)] = Full(0.0, TensorInfo((1, model.hidden_size), dtype))
    return InferenceForm(simpler, tensors, "; ".join(how), computed=nexus)


def _simpler(moe: MoEConfig, ungated: bool) -> MoEConfig:
    if moe.router in ("nexus", "flexolmo"):
        moe = dataclasses.replace(moe, router="top_k", options=dict(SHARE_OF_ALL))
    return dataclasses.replace(moe, shared_expert_gate=True) if ungated else moe
