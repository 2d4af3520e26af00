"""Mixtures of our own Hugging Face architecture: tiny ones with random weights, and what Megatron generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from btx_testing.models import randomise

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
NEXUS: dict[str, Any] = {
    "router": "nexus",
    "num_experts_per_tok": 1,
    "router_options": {"embedding_size": 6},
    "shared_expert_intermediate_size": 40,
}
ROUTERS: dict[str, dict[str, Any]] = {
    "top_k": {},
    "top_k-before": {"router_options": {"softmax": "before", "renormalise": False}},
    "top_k-before-renormalised": {"router_options": {"softmax": "before"}},
    "switch": {"router": "switch", "num_experts_per_tok": 1, "router_options": {"capacity_factor": 1.0}},
    "switch-dropless": {"router": "switch", "num_experts_per_tok": 1, "router_options": {"capacity_factor": 0.0}},
    "soft": {"router": "soft"},
    "sample_top1": {"router": "sample_top1", "num_experts_per_tok": 1},
    "noisy_top_k": {"router": "noisy_top_k"},
    "divmoe": {"router": "divmoe", "router_options": {"groups": 2}},
    "nexus": NEXUS,
    "flexolmo": {"router": "flexolmo"},
    "flexolmo-bias": {"router": "flexolmo", "router_options": {"bias": True}},
    "expert_choice": {"router": "expert_choice", "router_options": {"allow_non_causal": True}},
}
"""The settings of each router in config.json."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"family": "qwen2", "attention_bias": "qkv", "rope_scaling": YARN},
    "qwen3": {"family": "qwen3", "qk_norm": "head", "tie_word_embeddings": True, "head_dim": 16},
    "olmo2": {"family": "olmo2", "qk_norm": "full", "post_norm": True, "attention_bias": "all"},
    "olmo3": {
        "family": "olmo3",
        "qk_norm": "full",
        "post_norm": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": YARN,
        "rope_scaling_full_attention_only": True,
    },
    "olmoe": {"family": "olmoe", "qk_norm": "full"},
}
"""The settings of each family in config.json, each with something that another lacks."""
OF_A_PASS = ("switch", "expert_choice")
"""What they do with a token depends on the others of the pass."""


def pairs(routers: Any, families: Any, slow: Any = ()) -> list[Any]:
    """Every router over Llama but the `slow` ones, and one over every family, quickly; all in the slow suite."""
    import pytest

    def marks(router: str, family: str) -> Any:
        quick = router not in slow and (family == "llama" or router == "divmoe")
        return () if quick else pytest.mark.slow

    return [pytest.param(router, family, marks=marks(router, family)) for family in families for router in routers]


def make_model(seed: int = 0, **changes: Any) -> Any:
    """A `BtxMoeForCausalLM` in evaluation mode, nothing in it at a value that could hide a lost tensor."""
    from btx_nemo.convert.hf_moe.configuration_btx_moe import BtxMoeConfig
    from btx_nemo.convert.hf_moe.modeling_btx_moe import BtxMoeForCausalLM

    model = BtxMoeForCausalLM(BtxMoeConfig(**{**SIZES, **changes}))
    randomise(model, seed, std=0.15)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith((".gate.weight", ".domain_embeddings", ".w1", ".w2")):
                value.normal_(std=0.6, generator=generator)
            elif name.endswith(".penalty"):
                value.uniform_(-1, 0, generator=generator)
    model.generation_config.eos_token_id = None
    return model.eval()


def tokens(batch: int = 2, length: int = 24, seed: int = 3, vocab: int = 96) -> Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def megatron_continues(folder: str, prompt_BS: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The prompt with `count` most likely tokens, a full pass of Megatron's for each, and the logits on all of it.

    To be called on one rank.
    """
    from btx_nemo.config.schema import LayoutConfig
    from btx_nemo.convert.logits import model_logits
    from btx_nemo.megatron.load import load_weights
    from btx_nemo.megatron.model import build_model
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.train.source import open_source

    source, ids_BS = open_source(Path(folder)), prompt_BS
    with parallel_state(LayoutConfig(), seed=0):
        gpt = build_model(source.model, LayoutConfig(), transformer_engine=False)
        load_weights(gpt, source.expressions, source.readers, seed=0)
        while True:
            logits = model_logits(gpt, ids_BS)
            assert logits is not None
            logits = logits[..., : source.model.vocab_size]
            if ids_BS.shape[1] == prompt_BS.shape[1] + count:
                return ids_BS, logits
            ids_BS = torch.cat((ids_BS, logits[:, -1:].argmax(dim=-1)), dim=1)
