"""A vocabulary that no number of ranks divides: padded in a live model, without a trace elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import jobs, law_jobs
from btx_testing.models import hf_logits, make_model, probe_tokens
from btx_testing.pool import RankPool
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.checkpoints.torch_dist import DistReader
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.families.source import open_source

VOCABULARY = 251
TIED = [pytest.param("olmo2", id="untied"), pytest.param("qwen3", id="tied")]


@pytest.fixture(params=TIED)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_model(tmp_path / "hf", request.param, seed=7, vocab_size=VOCABULARY)


@pytest.mark.parametrize(("layout", "count"), [({}, 1), ({"tp": 2, "pp": 2}, 4)], ids=str)
def test_logits_and_gradients_are_those_of_transformers(
    ranks: RankPool, folder: Path, layout: dict[str, int], count: int
) -> None:
    from transformers import AutoModelForCausalLM

    tokens = probe_tokens(VOCABULARY)
    expected = hf_logits(folder, tokens)
    for logits in ranks.run(jobs.logits, str(folder), layout, tokens, ranks=count):
        if logits is not None:
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    batch = jobs.random_batch(VOCABULARY, total=2, length=32)
    history = ranks.run(jobs.one_step, str(folder), layout, batch, {"steps": 1}, ranks=count)[0]["history"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits = model(batch["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    norm = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert history[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_what_a_live_model_saves_is_exported_without_the_padding(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    ranks.run(law_jobs.megatron_saves, str(folder), str(tmp_path / "ckpt"), {"tp": 2}, "fp32", ranks=2)
    stored = DistReader(tmp_path / "ckpt").layout()["embedding.word_embeddings.weight"]
    assert stored.shape == (256, 64) and open_source(tmp_path / "ckpt").config.vocab_size == VOCABULARY
    assert not DistReader(tmp_path / "ckpt").read("embedding.word_embeddings.weight")[VOCABULARY:].any()
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    assert same_bits(load_folder(folder), load_folder(tmp_path / "back"))
    tokens = probe_tokens(VOCABULARY)
    (logits,) = ranks.run(jobs.logits, str(tmp_path / "ckpt"), {}, tokens, ranks=1)
    torch.testing.assert_close(logits, hf_logits(folder, tokens), atol=1e-4, rtol=0)


def test_an_import_has_the_true_rows_and_megatron_s_own_reader_loads_it(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    import_hf(folder, tmp_path / "ckpt")
    assert DistReader(tmp_path / "ckpt").layout()["embedding.word_embeddings.weight"].shape == (VOCABULARY, 64)
    tokens = probe_tokens(VOCABULARY)
    layout: dict[str, Any] = {"tp": 2}
    for logits in ranks.run(law_jobs.megatron_loads, str(tmp_path / "ckpt"), layout, tokens, ranks=2):
        torch.testing.assert_close(logits[..., :VOCABULARY], hf_logits(folder, tokens), atol=1e-4, rtol=0)
