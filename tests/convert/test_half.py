"""bf16: tensors to the bit, logits of its weights in fp32 as exact as ever, and in bf16 as near as bf16 can say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from btx_testing import jobs, law_jobs
from btx_testing.models import hf_logits, make_model, probe_tokens
from btx_testing.pool import RankPool
from btx_testing.tensors import load_folder, same_bits
from transformers import AutoModelForCausalLM

from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.families.architecture import read_config

NAMES = ["llama-yarn", "qwen2", "qwen3", "olmo2", "olmo3-yarn", "mixtral", "qwen2_moe-shared", "qwen3_moe", "flex_olmo"]
DENSE, MIXTURE, ANYWHERE = 0.02, 0.05, 0.1
"""The two engines' bf16 logits differ, in standard deviations of the logits, at the median position by no more than
five roundings of 2^-8 in a dense model, which is about what each differs from fp32 by. In a mixture a token between two
experts may go to either, and later tokens see that; so too over all positions (root mean square)."""


def median(difference_BSV: torch.Tensor, logits_BSV: torch.Tensor) -> float:
    return float(difference_BSV.square().mean(dim=-1).sqrt().median() / logits_BSV.std())


@pytest.mark.parametrize("name", NAMES)
def test_bf16_weights_and_logits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    src, tokens = make_model(tmp_path / "src", name, seed=3, dtype=torch.bfloat16), probe_tokens()
    import_hf(src, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    original, back = load_folder(src), load_folder(tmp_path / "back")
    assert same_bits(original, back) and {tensor.dtype for tensor in back.values()} == {torch.bfloat16}
    exact = hf_logits(tmp_path / "back", tokens)
    (ours,) = ranks.run(jobs.logits, str(tmp_path / "ckpt"), {}, tokens, ranks=1)
    torch.testing.assert_close(ours, exact, atol=1e-4, rtol=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        theirs = model.eval()(tokens).logits.float()
    (ours,) = ranks.run(law_jobs.half_logits, str(tmp_path / "ckpt"), {}, tokens, ranks=1)
    if read_config(src).moe is None:
        assert median(ours - theirs, exact) < DENSE
        assert median(ours - exact, exact) < 1.5 * median(theirs - exact, exact)
    else:
        assert median(ours - theirs, exact) < MIXTURE
    assert float((ours - theirs).square().mean().sqrt()) < ANYWHERE * float(exact.std())
