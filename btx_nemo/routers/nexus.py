"""`nexus`: Nexus's router (section 3.1), expert embeddings projected from frozen domain embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from btx_nemo.checkpoints.safetensors import SafetensorsReader
from btx_nemo.config.schema import RouterConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.execute import TensorReader
from btx_nemo.plan.expr import Normal, Take
from btx_nemo.routers.base import BaseRouter, Fresh, moe_of
from btx_nemo.routers.functional import domain_logits, project_domains, top_k_gates

EMBEDDINGS = "moe.options.embeddings"


class NexusRouter(BaseRouter):
    """Top-1 of softmax(x . e_i), not renormalised, beside a shared expert that every token passes ungated.

    e = W_2 SwiGLU(W_1 d): a domain that is added later brings its d, and the others' logits stay as they are.
    """

    @dataclass(frozen=True)
    class Options:
        """The domain embeddings."""

        embedding_size: int
        """Size D of a domain embedding."""
        embeddings: str | None = None
        """Folder with a model.safetensors that holds `domain_embeddings` [N, D]; read when the router is fresh."""

    only_top_k = 1
    rows = False

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        hidden, size = self.config.hidden_size, self.settings.embedding_size
        self.weight = None  # the logits' weights are computed
        self.w1 = self.parameter(2 * hidden, size)
        self.w2 = self.parameter(hidden, hidden)
        self.register_buffer("domain_embeddings", torch.empty(self.moe.num_experts, size, dtype=torch.float32))
        self._cache: Tensor | None = None

    @classmethod
    def check(cls, model: ModelConfig) -> None:
        """See the base."""
        super().check(model)
        size = cls.options_of(moe_of(model)).embedding_size
        if size < 1:
            raise UserError(f"moe.options.embedding_size={size}: must be 1 or more")
        if not moe_of(model).shared_expert_intermediate_size:
            raise UserError(
                "moe.router=nexus needs a shared expert; give its width, "
                f"moe.shared_expert_intermediate_size={model.ffn_hidden_size}"
            )

    @classmethod
    def tensors(cls, model: ModelConfig, router: RouterConfig) -> Fresh:
        """The projection and the embeddings."""
        hidden, settings = model.hidden_size, cls.options_of(moe_of(model))
        size = settings.embedding_size
        return {
            "router.w1": ((2 * hidden, size), Normal(size**-0.5)),
            "router.w2": ((hidden, hidden), Normal(model.init_std)),
            "router.domain_embeddings": (
                (moe_of(model).num_experts, size),
                Take(EMBEDDINGS, "domain_embeddings") if settings.embeddings else None,
            ),
        }

    @classmethod
    def readers(cls, model: ModelConfig) -> dict[str, TensorReader]:
        """The folder with the embeddings."""
        folder = cls.options_of(moe_of(model)).embeddings
        return {EMBEDDINGS: SafetensorsReader(folder)} if folder else {}

    def expert_embeddings(self) -> Tensor:
        """e [N, H]; computed once per evaluation and each time in training."""
        if self.training or torch.is_grad_enabled() or self._cache is None:
            embeddings = project_domains(self.domain_embeddings, self.w1, self.w2)
            if self.training or torch.is_grad_enabled():
                return embeddings
            self._cache = embeddings
        return self._cache

    def train(self, mode: bool = True) -> NexusRouter:
        """Forgets the cached embeddings: weights may have changed."""
        self._cache = None
        return super().train(mode)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """x . e_i."""
        return domain_logits(hidden_TH, self.expert_embeddings())

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `functional.top_k_gates`."""
        return top_k_gates(logits_TE, 1, softmax_before=True, renormalise=False)
