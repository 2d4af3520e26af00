"""BAR without reinforcement learning, from a base and an anchor to a merged, routed model that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import jobs
from btx_testing.chats import chat_domain, chat_tokenizer
from btx_testing.commands import CommandServer
from btx_testing.encoded import read_shared
from btx_testing.models import make_llama, probe_tokens
from btx_testing.pool import RankPool
from btx_testing.runs import SIZES, VOCAB, TinyWorld
from btx_testing.vectors import golden

from btx_nemo.convert.logits import hf_logits
from btx_nemo.families import names
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

DOMAINS = ("math", "code")
SMALL = ["data.seq_length=64", "global_batch_size=4", "micro_batch_size=2", "eval_batches=1", "optim.warmup_steps=0"]


def part_of(name: str) -> str:
    """A tensor's row in BAR's table; routers are looked at by row."""
    expert = names.parse_expert(name)
    if expert:
        return ("anchor_ffn", "domain_ffn")[expert[1]]
    if names.parse_router(name):
        return "router"
    for sign, part in (("embed_tokens", "embeddings"), ("lm_head", "lm_head"), ("norm", "norms")):
        if sign in name:
            return part
    assert ".self_attn." in name, name
    return "attention"


def check_stage(before: Path, after: Path, stage: str) -> None:
    """What BAR's table says trains has other bits, all else has the same."""
    expected, old, new = golden("bar.freeze_table")["expected"][stage], read_shared(before), read_shared(after)
    assert old.keys() == new.keys()
    for name, value in old.items():
        part = part_of(name)
        if part != "router":
            assert torch.equal(value, new[name]) is not expected[part], name
        elif name.endswith("weight"):
            rows = [not torch.equal(a, b) for a, b in zip(value, new[name])]
            assert rows == [expected["router_anchor_row"], expected["router_domain_row"]], name
        else:
            assert (new[name] <= 0).all(), "the bias of the domain stays below zero"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pre-trained base, the post-trained anchor, conversations."""
    root = tmp_path_factory.mktemp("bar")
    for number, name in enumerate(("base", "anchor")):
        chat_tokenizer(make_llama(root / name, seed=number, **SIZES))
    for number, domain in enumerate(DOMAINS):
        chat_domain(root, domain, 24 + 8 * number, seed=number)
    return root


def mixed(out: Path, recipe: str, seed: Path, experts: dict[str, Path], **options: Any) -> Path:
    paths = {name: str(path) for name, path in experts.items()}
    run_mix(MixConfig(recipe=recipe, seed=str(seed), experts=paths, out=str(out), format="megatron", options=options))
    return out


@pytest.mark.slow
def test_from_the_base_to_a_merged_and_routed_model(
    world: TinyWorld, start: Path, ranks: RankPool, commands: CommandServer, tmp_path: Path
) -> None:
    def train(name: str, out: Path, source: Path, data: Path, *more: str, count: int = 1) -> Path:
        overrides = [f"init_from={source}", f"data.path={data}", f"out={out}", *SMALL, *more]
        for ended in commands.run_ranks(count, "train", "--config-name", name, *overrides):
            assert ended.code == 0, ended.err
        return out

    pairs: dict[str, Path] = {}
    for domain in DOMAINS:
        pair = mixed(tmp_path / f"pair-{domain}", "two_expert", start / "anchor", {domain: start / "base"})
        mid = train(
            "tiny_bar_midtrain", tmp_path / f"mid-{domain}", pair, world.data, f"domain={domain}", "tokens=2000"
        )
        check_stage(pair, mid, "mid_training")
        layout = ["layout.ep=2"] if domain == "math" else ["layout.pp=2"]
        tuned = tmp_path / f"expert-{domain}"
        pairs[domain] = train("tiny_bar_sft", tuned, mid, start / "data", f"domain={domain}", *layout, count=2)
        check_stage(mid, pairs[domain], "sft")

    merged = mixed(tmp_path / "mix", "bar", start / "anchor", pairs)
    router = train("tiny_bar_router", tmp_path / "router", merged, start / "data")
    check_merge_and_router(start / "anchor", pairs, merged, router)
    check_export(ranks, router)
    check_operation(merged, router, tmp_path)


def check_merge_and_router(anchor: Path, pairs: dict[str, Path], merged: Path, router: Path) -> None:
    """The anchor's blocks and each domain's, shared tensors averaged over the domains; then routers alone train."""
    seed, after, final = read_shared(anchor), read_shared(merged), read_shared(router)
    experts = [read_shared(pair) for pair in pairs.values()]
    for name, value in after.items():
        expert = names.parse_expert(name)
        if names.parse_router(name):
            assert not torch.equal(value, final[name]) and all((value != final[name]).any(dim=1)), "all rows train"
            continue
        assert torch.equal(value, final[name]), name
        if expert is None:
            mean = torch.stack([model[name] for model in experts]).mean(0)
            torch.testing.assert_close(value, mean, atol=1e-6, rtol=0)
        elif expert[1] == 0:
            assert torch.equal(value, seed[names.ffn(expert[0], expert[2])])
        else:
            assert torch.equal(value, experts[expert[1] - 1][names.expert(expert[0], 1, expert[2])])


def check_export(ranks: RankPool, run: Path) -> None:
    """transformers computes what Megatron does."""
    tokens = probe_tokens(VOCAB, length=40)
    (ours,) = ranks.run(jobs.logits, str(run), {}, tokens, ranks=1)
    torch.testing.assert_close(hf_logits(run / "hf", tokens), ours, atol=1e-4, rtol=0)


def check_operation(merged: Path, run: Path, tmp_path: Path) -> None:
    """An operation on the trained run knows what the merge kept aside."""
    found = {}
    for name, options in (("known", {}), ("given", {"aside": str(merged / "shared_per_expert")})):
        found[name] = read_shared(mixed(tmp_path / name, "remove", run, {}, names=["code"], **options))
    assert found["known"].keys() == found["given"].keys()
    assert all(torch.equal(value, found["given"][name]) for name, value in found["known"].items())
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(found["known"][embedding], read_shared(run)[embedding]), "averaged anew"
