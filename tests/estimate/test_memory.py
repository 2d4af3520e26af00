"""Estimates against what models hold: parameters exactly, autograd's memory within 4 %, processes within 15 %."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from btx_testing import estimate_jobs
from btx_testing.pool import RankPool

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.estimate.memory import Setup, activations, memory
from btx_nemo.families.config import ModelConfig, MoEConfig

ROOT = Path(__file__).resolve().parents[2]
MOE = MoEConfig(num_experts=4, top_k=2)
SHARED = MoEConfig(num_experts=8, top_k=1, shared_expert_intermediate_size=176)
SOME = MoEConfig(num_experts=4, top_k=2, layers=[1, 3], dense_ffn_hidden_size=96)


def model(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = dict(
        num_layers=4, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, num_query_groups=2, head_dim=16,
        vocab_size=512,
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})


def setup(layout: LayoutConfig, ranks: int, **changes: Any) -> Setup:
    values = dict(seq_length=64, micro_batch_size=2, microbatches=1, precision="fp32", flash=False)
    return Setup(layout=layout, ranks=ranks, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("moe", [None, MOE, SHARED, SOME], ids=["dense", "moe", "shared", "some-layers"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("axes", "count"),
    [
        ({}, 1),
        ({"tp": 2, "ep": 2}, 2),
        ({"pp": 2}, 2),
        ({"pp": 2, "vpp": 2, "etp": 2}, 4),
        ({"tp": 2, "pp": 2, "ep": 2}, 4),
    ],
    ids=["one", "tp2-ep2", "pp2", "pp2-vpp2-etp2", "tp2-pp2-ep2"],
)
def test_parameters_of_every_rank(
    ranks: RankPool, moe: MoEConfig | None, tied: bool, axes: dict[str, int], count: int
) -> None:
    layout = LayoutConfig(**{name: size for name, size in axes.items() if moe or name not in ("ep", "etp")})
    shape = model(moe=moe, tie_word_embeddings=tied)
    for stage, held in ranks.run(estimate_jobs.parameters, shape, layout, ranks=count):
        assert memory(shape, setup(layout, count), stage).parameters == held


SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"moe": MOE},
    "shared": {"moe": SHARED},
    "some-layers": {"moe": SOME},
    "qwen3": {"family": "qwen3", "qk_norm": "head"},
    "olmo2": {"family": "olmo2", "qk_norm": "full", "post_norm": True},
}


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "length"), [(2, 64), (1, 128)])
def test_what_autograd_keeps(ranks: RankPool, kind: str, precision: str, batch: int, length: int) -> None:
    layout, shape = LayoutConfig(), model(**SHAPES[kind])
    (kept,) = ranks.run(estimate_jobs.kept_bytes, shape, layout, batch, length, precision, ranks=1)
    step = setup(layout, 1, seq_length=length, micro_batch_size=batch, precision=precision)
    logits = 4 * step.tokens * shape.vocab_size  # one of the two is gone by then
    assert activations(shape, step, 0) - logits == pytest.approx(kept, rel=0.04)


@pytest.mark.parametrize(
    "recompute",
    [{"recompute": "none"}, {"recompute": "full"}]
    + [{"recompute": "selective", "recompute_modules": (module,)} for module in ("core_attn", "mlp")],
    ids=["none", "full", "core_attn", "mlp"],
)
def test_what_recomputes_attention_keeps_each_micro_batchs_document_mask(
    ranks: RankPool, recompute: dict[str, Any]
) -> None:
    kept = [
        ranks.run(estimate_jobs.kept_bytes, model(), LayoutConfig(), 2, 64, "fp32", documents, recompute, ranks=1)[0]
        for documents in (False, True)
    ]
    # The first of two stages holds two micro-batches when there are two.
    planned = [
        [
            activations(model(), setup(LayoutConfig(pp=2), 2, microbatches=n, documents=documents, **recompute), 0)
            for documents in (False, True)
        ]
        for n in (1, 2)
    ]
    (one, one_masked), (two, two_masked) = planned
    assert one_masked - one == 2 * 64 * 64  # batch x S^2
    order = 4 * 8 * 64  # of the gathered keys, by layer, where they are kept
    assert (two_masked - two) - (one_masked - one) == pytest.approx(kept[1] - kept[0], abs=order)


def test_recomputation_and_flash_save_what_they_should() -> None:
    shape, layout = model(num_layers=8, vocab_size=64), LayoutConfig()
    full = activations(shape, setup(layout, 1), 0)
    assert activations(shape, setup(layout, 1, recompute="full"), 0) < 0.25 * full
    without = activations(shape, setup(layout, 1, seq_length=512, flash=True), 0)
    scores = activations(shape, setup(layout, 1, seq_length=512), 0) - without
    assert scores == 8 * 4 * 4 * 2 * 512**2  # layers x fp32 x heads x batch x S^2
    documents = activations(shape, setup(layout, 1, seq_length=512, flash=True, documents=True), 0)
    assert documents - without == scores + 2 * 512**2  # batch x S^2


def test_the_first_stage_holds_more_micro_batches() -> None:
    layout = LayoutConfig(pp=4)
    held = [activations(model(vocab_size=64), setup(layout, 4, microbatches=8), stage) for stage in range(3)]
    assert held == [4 * held[2] // 2, 3 * held[2] // 2, held[2]]
    assert activations(model(), setup(layout, 4, microbatches=1), 0) == held[2] // 2


@pytest.mark.parametrize(("precision", "main"), [("fp32", 0), ("bf16", 4)])
def test_an_average_and_an_optimizer_on_the_host(precision: str, main: int) -> None:
    """Bytes a parameter of two data-parallel ranks: moments, main weights, average; gradients as well on the host."""
    shape, layout = model(), LayoutConfig()
    plain, averaged, half, whole = (
        memory(shape, setup(layout, 2, precision=precision, ema=ema, offload=offload), 0)
        for ema, offload in ((False, 0.0), (True, 0.0), (True, 0.5), (True, 1.0))
    )
    assert 2 * plain.optimizer == (8 + main) * plain.parameters and plain.host == 0
    assert 2 * averaged.optimizer == (12 + main) * plain.parameters
    assert (half.optimizer, half.host) == (averaged.optimizer // 2, 10 * plain.parameters // 2)
    assert (whole.optimizer, whole.host) == (0, 10 * plain.parameters)
    assert whole.total == plain.total - plain.optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (1, ""),
        (1, "--moe --precision bf16"),
        (2, "--tp 2"),
        (2, "--pp 2"),
        (2, "--ep 2 --moe"),
        (4, "--tp 2 --pp 2 --ep 2 --moe"),
        (1, "--recompute full"),
        (1, "--recompute selective"),
        (2, "--cp 2"),
        (2, "--pp 2 --vpp 2"),
        (2, "--etp 2 --moe"),
        (1, "--precision bf16 --ema --offload 0.7"),
        (1, "--documents"),
        (2, "--documents --recompute full --pp 2"),
        (2, "--ep 2 --moe --precision bf16 --save"),
    ],
)
def test_measured_processes(count: int, arguments: str) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "scripts/check_plan.py", *arguments.split()]
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert float(ended.stdout.split()[-1]) == pytest.approx(1, abs=0.15), ended.stdout
