"""The local core attention against Megatron's own: the same bits, forwards and backwards."""

from __future__ import annotations

import pytest
from btx_testing import attention_jobs
from btx_testing.pool import RankPool


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("hides", ["later", "window", "documents"])
def test_attention_is_megatrons_to_the_bit(ranks: RankPool, precision: str, hides: str) -> None:
    (found,) = ranks.run(attention_jobs.core_attentions, precision, hides, ranks=1)
    assert set(found) == {"output", "query", "key", "value"}
    for name, (ours, theirs) in found.items():
        assert ours.isfinite().all() and ours.count_nonzero(), name
        assert ours.equal(theirs), name


def test_the_mask_costs_no_step_backwards(ranks: RankPool) -> None:
    (steps,) = ranks.run(attention_jobs.steps_backwards, "fp32", "window", ranks=1)
    assert "BmmBackward0" in steps
    assert not {"CopySlices", "AsStridedBackward0", "MaskedFillBackward0"} & steps
