"""The frame around the rules, on one rank and two: padding, global counts, the dispatcher, an own router, fp32."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from btx_testing import frame_jobs
from btx_testing.pool import RankPool

from btx_nemo import routers
from btx_nemo.errors import UserError
from btx_nemo.families.architecture import is_renormalised_top_k
from btx_nemo.families.config import MoEConfig
from btx_nemo.routers import register_router, router_class, router_names
from btx_nemo.routers.rows import check_frozen_rows

NAMES = ["top_k", "switch", "soft", "divmoe", "flexolmo", "nexus", "noisy_top_k", "expert_choice"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2])
def test_padding_counts_nowhere(ranks: RankPool, name: str, count: int) -> None:
    """Losses, gradients and statistics with garbage in padded places are those without these places."""
    layout = {"tp": count}
    for padded, clean in ranks.run(frame_jobs.padding, name, layout, ranks=count):
        assert padded.keys() == clean.keys()
        for key, value in clean.items():
            torch.testing.assert_close(padded[key], value, atol=1e-5, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


def test_global_counts_are_megatrons(ranks: RankPool) -> None:
    """switch_global over two data-parallel ranks and three micro-batches, and a new step forgets."""
    for ours, theirs in ranks.run(frame_jobs.global_counts, ranks=2):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_casts_leave_a_router_alone(ranks: RankPool) -> None:
    (kept,) = ranks.run(frame_jobs.casts, ranks=1)
    assert kept == {"weight": "torch.float32", "exact": True}


def test_a_setting_of_megatrons_router_that_ours_ignores_is_refused(ranks: RankPool) -> None:
    """By every router, in one line that names it."""
    (messages,) = ranks.run(frame_jobs.refusals, ranks=1)
    assert messages.keys() == frame_jobs.FOREIGN.keys()
    for key, texts in messages.items():
        assert len(texts) >= 9
        for text in texts:
            assert text.startswith(f"{key}={frame_jobs.FOREIGN[key]}") and "\n" not in text


@pytest.mark.parametrize("name", ["top_k", "soft", "divmoe", "flexolmo", "nexus", "switch"])
def test_context_parallel_ranks_share_a_micro_batch(ranks: RankPool, name: str) -> None:
    """Losses, their gradients and the statistics, with padding."""
    for both, one in ranks.run(frame_jobs.context_parallel, name, ranks=2):
        for key, value in one.items():
            if key in ("losses", "micro_batches"):  # each rank has the whole
                value = 2 * value
            torch.testing.assert_close(both[key], value, atol=1e-5, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize(
    ("name", "gone", "settings"),
    [
        ("top_k", [1], ({}, {})),
        ("flexolmo", [2], ({"bias": True}, {"bias": True})),
        ("nexus", [3], ({"embedding_size": 4}, {"embedding_size": 4})),
        ("divmoe", [2, 3], ({"groups": 3}, {"groups": 2})),  # a domain is a group
        ("soft", [0], ({}, {})),
    ],
)
def test_an_expert_that_opted_out_was_never_there(
    ranks: RankPool, name: str, gone: list[int], settings: tuple[dict, dict]
) -> None:
    """Deleting its row (embedding, group) from a router's state is a logit of minus infinity."""
    (found,) = ranks.run(frame_jobs.opted_out, name, 6, gone, settings, ranks=1)
    assert torch.equal(found["kept"], found["kept never"])
    torch.testing.assert_close(found["out"], found["never"], atol=1e-6, rtol=1e-6)
    assert (found["gone"] == 0).all()


def test_a_router_without_rows_has_none_to_freeze() -> None:
    moe = MoEConfig(num_experts=4, top_k=1, router="nexus")
    with pytest.raises(UserError, match=r"router\.frozen_rows=\[0\]: moe\.router=nexus has no rows of its own"):
        check_frozen_rows([0], moe, router_class("nexus").rows)


@pytest.mark.parametrize("name", router_names())
def test_only_routers_with_a_capacity_take_one(name: str) -> None:
    moe = MoEConfig(num_experts=4, top_k=1, router=name, options={"capacity_factor": 1.25})
    if name in ("switch", "expert_choice"):
        assert router_class(name).options_of(moe).capacity_factor == 1.25
    else:
        with pytest.raises(UserError, match=r"unknown key moe\.options\.capacity_factor"):
            router_class(name).options_of(moe)


def test_noise_has_its_law(ranks: RankPool) -> None:
    """The same seed, the same noise; another micro-batch or layer, another."""
    (equal,) = ranks.run(frame_jobs.noise, ranks=1)
    assert equal == {"again": True, "other seed": False, "other layer": False}


def test_cached_embeddings_are_forgotten_when_training_goes_on(ranks: RankPool) -> None:
    (result,) = ranks.run(frame_jobs.nexus_cache, ranks=1)
    assert result == {"cached": True, "after training": True}


def test_an_own_router(ranks: RankPool) -> None:
    """The example of docs/routers.md."""
    name = "first_experts"
    register_router(name, "btx_testing.own_router:FirstExperts")
    register_router(name, "btx_testing.own_router:FirstExperts")  # the same again is no mistake
    with pytest.raises(ValueError, match=r"is btx_testing\.own_router:FirstExperts already"):
        register_router(name, "elsewhere:Other")
    assert name in router_names()
    (load,) = ranks.run(frame_jobs.own_router, name, ranks=1)
    assert load == pytest.approx([0.5, 0.5, 0, 0])


def test_the_documented_example_is_the_tested_one() -> None:
    root = Path(__file__).resolve().parents[2]
    tested = (root / "tests" / "support" / "btx_testing" / "own_router.py").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", (root / "docs" / "routers.md").read_text(), re.DOTALL)
    body = [line for line in code.splitlines() if line.startswith("        ")]
    assert len(body) == 3 and all(line in tested for line in body)


def test_an_installed_package_may_offer_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its entry points; it cannot take the name of one of ours."""
    offered = [
        EntryPoint("theirs", "btx_testing.own_router:FirstExperts", "btx_nemo.routers"),
        EntryPoint("top_k", "elsewhere:TopK", "btx_nemo.routers"),
    ]
    monkeypatch.setattr(routers, "entry_points", lambda group: [e for e in offered if e.group == group])
    routers._installed.cache_clear()
    try:
        assert router_class("theirs").__name__ == "FirstExperts"
        assert router_class("top_k").__module__ == "btx_nemo.routers.top_k"
    finally:
        routers._installed.cache_clear()


def test_a_router_that_is_not_there_is_told() -> None:
    register_router("ghost", "no_such_package:Router")
    with pytest.raises(UserError, match=r"moe\.router=ghost: no_such_package:Router cannot be imported"):
        router_class("ghost")


def test_only_mixtrals_rule_is_mixtrals() -> None:
    assert is_renormalised_top_k(MoEConfig(num_experts=4))
    assert is_renormalised_top_k(MoEConfig(num_experts=4, options={"softmax": "before"}))
    assert not is_renormalised_top_k(MoEConfig(num_experts=4, options={"softmax": "before", "renormalise": False}))
    assert not is_renormalised_top_k(MoEConfig(num_experts=4, router="flexolmo"))
