"""The plan command: layouts that fit, what is sent, and mistakes in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from btx_testing.commands import CommandServer

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.errors import UserError
from btx_nemo.estimate.command import model_of
from btx_nemo.estimate.communication import communication
from btx_nemo.estimate.memory import Setup, memory, worst
from btx_nemo.estimate.suggest import HEADROOM, candidates, flops, suggest
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.megatron.parallel import check_batch, check_layout
from btx_nemo.plan.progress import human_bytes

MIXTRAL = ModelConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8, head_dim=128,
    vocab_size=32000, moe=MoEConfig(num_experts=8, top_k=2),
)  # fmt: skip
GIB = 2**30


def test_suggestions_fit_and_can_be_started() -> None:
    found = suggest(MIXTRAL, candidates(MIXTRAL, 64, global_batch_size=1024, seq_length=4096), 80 * GIB)
    assert found
    for candidate in found:
        check_layout(candidate.setup.layout, 64, MIXTRAL)
        check_batch(candidate.setup.layout, seq_length=4096, microbatches=candidate.setup.microbatches)
        assert worst(MIXTRAL, candidate.setup).total <= HEADROOM * 80 * GIB
        assert candidate.setup.microbatches * candidate.setup.dp * candidate.setup.micro_batch_size == 1024
    assert found == sorted(found, key=lambda candidate: candidate.seconds)


def test_new_axes_where_they_help() -> None:
    long = candidates(MIXTRAL, 64, global_batch_size=256, seq_length=65536)
    assert any(found.setup.layout.cp > 1 for found in suggest(MIXTRAL, long, 80 * GIB))
    short = list(candidates(MIXTRAL, 64, global_batch_size=64, seq_length=4096))
    assert not any(setup.layout.cp > 1 for setup in short)
    assert any(setup.layout.vpp > 1 for setup in short) and any(setup.layout.etp > 1 for setup in short)


def test_what_is_given_stays() -> None:
    given = {"tp": 2, "vpp": 1}
    setups = candidates(MIXTRAL, 64, global_batch_size=1024, seq_length=4096, micro_batch_size=2, given=given)
    found = suggest(MIXTRAL, setups, 80 * GIB, recomputes=("full",))
    assert {(s.layout.tp, s.layout.vpp, s.micro_batch_size, s.recompute) for s in (f.setup for f in found)} == {
        (2, 1, 2, "full")
    }


def test_tensor_parallelism_cuts_dense_widths_and_not_the_experts() -> None:
    def tried(width: int, dense: int, layers: tuple[int, ...] | None) -> None:
        moe = MoEConfig(num_experts=8, top_k=2, layers=layers, dense_ffn_hidden_size=dense)
        check_layout(LayoutConfig(tp=2), 2, dataclasses.replace(MIXTRAL, ffn_hidden_size=width, moe=moe))

    tried(1001, 1000, (0,))
    tried(1001, 1001, None)
    with pytest.raises(UserError, match=r"layout.tp=2 does not divide the model's ffn_hidden_size .dense layers.=1001"):
        tried(1000, 1001, (0,))


def test_too_little_memory_says_how_much_it_takes() -> None:
    with pytest.raises(UserError, match=r"the smallest needs \d+ GiB a GPU, 10 are there; give more gpus"):
        suggest(MIXTRAL, candidates(MIXTRAL, 8, global_batch_size=1024, seq_length=4096), 10 * GIB)


def test_flops_are_six_per_active_parameter_and_token() -> None:
    active = 12.9e9 - 32000 * 4096  # Mixtral 8x7B's, without the embedding, which is looked up
    assert flops(MIXTRAL, 1) == pytest.approx(6 * active, rel=0.01)


def test_what_is_sent() -> None:
    def sent(**layout: int):
        ranks = layout.pop("ranks")
        return communication(MIXTRAL, Setup(LayoutConfig(**layout), ranks, 4096, 1, 8, "bf16"))

    alone = sent(ranks=1)
    assert alone.total == 0
    assert sent(ranks=2, pp=2).pipeline == 2 * 8 * 4096 * 4096 * 2
    assert sent(ranks=2, pp=2, vpp=4).pipeline == 4 * sent(ranks=2, pp=2).pipeline
    # keys and values of half the sequence, 8 heads of 128: sent, sent again backwards, and their gradients
    assert sent(ranks=2, cp=2).context == 32 * 8 * 3 * 2 * 2048 * 1024 * 2
    # each of a rank's tokens goes to its two experts' other halves and back, twice
    assert sent(ranks=2, etp=2).expert == 32 * 8 * 4 * 2 * 4096 * 4096 * 2
    # each token goes to two experts and back, twice, and one rank in four is home
    assert sent(ranks=4, ep=4).expert == 32 * 8 * 4 * 2 * 4096 * 4096 * 2 * 3 // 4
    dense = 1_605_640_192  # Mixtral's parameters outside of the experts
    assert sent(ranks=8, ep=8).data == pytest.approx(dense * 6 * 7 / 8, rel=0.01)


@pytest.mark.parametrize(
    ("router", "options", "experts"),
    [
        ("soft", {}, [8.0] * 32),
        ("sample_top1", {}, [8.0] + [1.0] * 31),
        ("expert_choice", {"allow_non_causal": True, "capacity_factor": 1.25}, [1.25] * 32),
    ],
)
def test_a_token_meets_as_many_experts_as_its_router_says(router: str, options: dict, experts: list[float]) -> None:
    def model(moe: MoEConfig) -> ModelConfig:
        return dataclasses.replace(MIXTRAL, moe=moe)

    def counts(moe: MoEConfig) -> tuple[float, int, int]:
        setup = Setup(LayoutConfig(ep=2), 2, 4096, 1, 8, "bf16")
        return flops(model(moe), 1), communication(model(moe), setup).expert, worst(model(moe), setup).activations

    ours = counts(MoEConfig(num_experts=8, top_k=2, router=router, options=options))
    one, two = (counts(MoEConfig(num_experts=8, top_k=k)) for k in (1, 2))
    for mine, first, second in zip(ours, one, two):
        assert mine == pytest.approx(first + (second - first) * (sum(experts) / 32 - 1), rel=1e-6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 32000,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 22,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
            }
        )
    )
    return tmp_path


def test_the_command(commands: CommandServer, folder: Path) -> None:
    ended = commands.run("plan", folder, "--tp", "2", "--gpus", "4", "--seq-length", "2048")
    assert ended.code == 0 and "optimizer" in ended.out and "FLOP a step of 2,097,152 tokens" in ended.out
    assert "a save takes " in ended.out
    ended = commands.run("plan", folder, *["--pp", "2", "--vpp", "11", "--cp", "2", "--recompute", "selective"])
    assert ended.code == 0 and "a rank of tp=1 pp=2 vpp=11 cp=2 ep=1, 4 ranks" in " ".join(ended.out.split())
    ended = commands.run("plan", folder, "--gpus", "8", "--memory-gib", "40")
    assert ended.code == 0 and "layouts that fit into 40 GiB" in ended.out


@pytest.mark.parametrize("options", [[], ["--documents"], ["--local", "--recompute", "selective"]])
def test_it_prints_the_estimate(commands: CommandServer, folder: Path, options: list[str]) -> None:
    arguments = ["--tp", "2", "--gpus", "4", "--seq-length", "2048", *options]
    ended = commands.run("plan", folder, *arguments)  # into a pipe: nothing is cut off
    setup = Setup(
        LayoutConfig(tp=2), 4, 2048, 1, 512,
        flash="--local" not in options,
        documents="--documents" in options,
        recompute="selective" if "selective" in options else "none",
    )  # fmt: skip
    planned = memory(model_of(folder), setup, stage=0)
    names = ("weights", "gradients", "optimizer", "activations", "total")
    (row,) = (line for line in ended.out.splitlines() if f"{planned.parameters:,}" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")][2:] == [
        human_bytes(getattr(planned, name)) for name in names
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "layout.tp=3 does not divide the model's num_attention_heads=32"),
        (["--ep", "2"], "the model is dense"),
        (["--gpus", "0"], "--gpus 0: must be 1 or more"),
        (["--gpus", "3", "--tp", "2"], "does not divide the 3 ranks"),
        (["--precision", "fp4"], "--precision fp4: unknown; known: fp32, bf16, fp16"),
        (
            ["--micro-batch-size", "3"],
            "global_batch_size=1024 is not a positive multiple of micro_batch_size=3 x data-par",
        ),
        (["--gpus", "8", "--memory-gib", "1"], "no layout fits"),
        (["--gpus", "7", "--memory-gib", "80"], "no layout divides"),
        (["--gpus", "8", "--memory-gib", "80", "--tp", "3"], "no layout divides"),
        (["--micro-batch-size", "0"], "--micro-batch-size 0: must be 1 or more"),
        (["--gpus", "99999999999999", "--memory-gib", "80"], "--gpus: must be at most 16777216"),
        (["--seq-length", "9" * 400], "--seq-length: must be at most"),
        (["--memory-gib", "nan"], "--memory-gib nan: must be a positive number"),
        (["--memory-gib", "inf"], "--memory-gib inf: must be a positive number"),
        (["--memory-gib=-5"], "--memory-gib -5: must be a positive number"),
    ],
)
def test_mistakes(commands: CommandServer, folder: Path, arguments: list[str], message: str) -> None:
    ended = commands.run("plan", folder, *arguments)
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1
