"""Tiny random models with nothing left at a value that could hide a lost tensor: norms are random too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=256,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
)


def randomise(model: torch.nn.Module, seed: int, std: float = 0.08) -> None:
    """Fresh values for every parameter: norms around one, the rest N(0, std^2)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else std * noise)


def make_llama(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, kind: str = "Llama", **changes: Any
) -> Path:
    """A Llama (or, by `kind`, Mistral) folder as transformers writes it."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**TINY, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder)
    return folder


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-yarn": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9000.0, "factor": 4.0,
                             "original_max_position_embeddings": 32}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "tie_word_embeddings": True}
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True}),
    "olmo3": ("Olmo3", {"sliding_window": 9}),
    "olmo3-yarn": (
        "Olmo3",
        {"sliding_window": 9, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 9000.0, "factor": 4.0, "attention_factor": 1.3,
                               "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1},
            "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0}}},
    ),
}  # fmt: skip
"""Dense models of every family: class in transformers, settings beyond TINY."""
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 0}),
    "qwen2_moe-shared": (
        "Qwen2Moe", {**_EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32,
                     "norm_topk_prob": False}
    ),
    "qwen3_moe": (
        "Qwen3Moe", {**_EXPERTS, "moe_intermediate_size": 48, "mlp_only_layers": [1], "head_dim": 16}
    ),
    "olmoe": ("Olmoe", {**_EXPERTS, "norm_topk_prob": False}),
    "flex_olmo": ("FlexOlmo", {**_EXPERTS, "pad_token_id": None, "eos_token_id": 2}),
}  # fmt: skip
"""Mixtures of every architecture."""


def make_model(folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A folder with a tiny random model of FAMILIES or MIXTURES: norms, biases and routers are random too."""
    import transformers

    kind, settings = (FAMILIES | MIXTURES)[name]
    config = getattr(transformers, f"{kind}Config")(**{**TINY, "rms_norm_eps": 1e-5, **settings, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder)
    return folder


def hf_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """fp32 logits of a Hugging Face folder, from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(tokens).logits.float()


def probe_tokens(vocab_size: int = 256, batch: int = 2, length: int = 48, seed: int = 7) -> torch.Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_mixtral(folder: Path, *, seed: int = 0, num_experts: int = 4, top_k: int = 2, **changes: Any) -> Path:
    """A Mixtral folder with per-expert tensors, router logits with a standard deviation of about one."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **{**TINY, "num_local_experts": num_experts, "num_experts_per_tok": top_k, "sliding_window": None, **changes}
    )
    model = MixtralForCausalLM(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder
