"""What only a GPU shows: Transformer Engine's layers. None of these has run yet on the machines of this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import jobs
from btx_testing.models import hf_logits, make_llama, make_mixtral, probe_tokens
from btx_testing.pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: run on a machine that has one"),
]


@pytest.mark.parametrize("make", [make_llama, make_mixtral])
def test_logits_equal_transformers(ranks: RankPool, tmp_path: Path, make: Any) -> None:
    folder, tokens = make(tmp_path / "hf", seed=1), probe_tokens()
    (ours,) = ranks.run(jobs.logits, str(folder), {}, tokens, ranks=1)
    torch.testing.assert_close(ours, hf_logits(folder, tokens), atol=1e-3, rtol=0)


@pytest.mark.parametrize("make", [make_llama, make_mixtral])
def test_bf16_follows_fp32(ranks: RankPool, tmp_path: Path, make: Any) -> None:
    """Three steps with Transformer Engine's layers where it is installed: the losses agree to bf16's precision."""
    folder, batch = make(tmp_path / "hf", seed=1), jobs.random_batch(256, total=4, length=32)
    (fp32,) = ranks.run(jobs.one_step, str(folder), {}, batch, {"steps": 3}, ranks=1)
    (bf16,) = ranks.run(jobs.one_step, str(folder), {}, batch, {"steps": 3, "precision": "bf16"}, ranks=1)
    for ours, theirs in zip(bf16["history"], fp32["history"]):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
