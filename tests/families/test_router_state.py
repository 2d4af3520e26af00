"""What a checkpoint holds of a router is known without Megatron, and is what the router itself says."""

from __future__ import annotations

from pathlib import Path

import pytest

from btx_nemo.config.schema import RouterConfig
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.families.router_state import router_state
from btx_nemo.routers import router_class, router_names

OPTIONS = {
    "divmoe": [{"groups": 2}],
    "nexus": [{"embedding_size": 5, "embeddings": "somewhere"}],
    "flexolmo": [{}, {"bias": True}],
    "expert_choice": [{"acausal": True}],
}


@pytest.mark.parametrize(
    ("router", "options"), [(router, given) for router in router_names() for given in OPTIONS.get(router, [{}])]
)
def test_shapes_are_the_routers_own(router: str, options: dict, tmp_path: Path) -> None:
    kind = router_class(router)
    moe = MoEConfig(
        num_experts=4, top_k=kind.only_top_k or 2, router=router, options=options, shared_expert_intermediate_size=16
    )
    model = ModelConfig(
        num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=2, head_dim=4,
        vocab_size=32, moe=moe,
    )  # fmt: skip
    tensors = kind.tensors(model, RouterConfig())
    own = {name.removeprefix("router."): shape for name, (shape, _) in tensors.items() if name.startswith("router.")}
    assert router_state(model) == own
