"""Parameters are counted as transformers counts them, part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
from btx_testing.models import FAMILIES, MIXTURES, make_model

from btx_nemo.checkpoints.inspect import inspect_checkpoint


@pytest.mark.parametrize("name", ["qwen3", "olmo2-bias", "mixtral", "qwen2_moe-shared", "qwen3_moe"])
def test_total_and_parts_against_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    assert name in FAMILIES | MIXTURES
    folder = make_model(tmp_path / "hf", name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    counted = inspect_checkpoint(folder)["parameters"]
    assert counted["total"] == sum(parameter.numel() for parameter in model.parameters())
    parts = {part: count["total"] for part, count in counted["parts"].items()}
    assert sum(parts.values()) == counted["total"]
    by_name = {key: parameter.numel() for key, parameter in model.named_parameters()}
    assert parts["norms"] == sum(count for key, count in by_name.items() if "norm" in key)
    assert parts["embeddings"] == by_name["model.embed_tokens.weight"]
    assert parts.get("output", 0) == by_name.get("lm_head.weight", 0)
    experts = sum(count for key, count in by_name.items() if ".experts." in key)
    assert parts.get("experts", 0) == experts
    assert parts.get("shared", 0) == sum(count for key, count in by_name.items() if "shared_expert" in key)
    assert counted["active"] == counted["total"] - experts // 2  # two of four experts
