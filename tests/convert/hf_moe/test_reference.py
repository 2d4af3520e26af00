"""Against what others compute: transformers' own mixtures and dense models, and plain loops in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import models, naive
from btx_testing.hf_moe import ROUTERS, make_model
from btx_testing.tensors import load_folder, same_bits
from torch import Tensor

from btx_nemo.convert.logits import hf_logits
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix


@pytest.mark.parametrize("name", models.MIXTURES)
def test_it_computes_what_transformers_own_mixtures_do(tmp_path: Path, name: str) -> None:
    src = models.make_model(tmp_path / "src", name, seed=4)
    import_hf(src, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "ours", target="btx_moe")
    expected, found = (hf_logits(folder, models.probe_tokens()) for folder in (src, tmp_path / "ours"))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    import_hf(tmp_path / "ours", tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "back", target=name.partition("-")[0])
    export_hf(tmp_path / "ckpt", tmp_path / "direct")
    assert same_bits(load_folder(tmp_path / "back"), load_folder(tmp_path / "direct"))


SEEDS = {**models.FAMILIES, "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}})}


@pytest.mark.parametrize("name", SEEDS)
def test_copies_of_a_dense_model_compute_what_it_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, norms, windows and every scaling of rope, in each family."""
    monkeypatch.setitem(models.FAMILIES, name, SEEDS[name])
    seed = models.make_model(tmp_path / "seed", name, seed=3)
    experts = {other: str(seed) for other in ("math", "code")}
    settings: dict[str, Any] = {"seed": str(seed), "experts": experts, "target": "btx_moe", "router_init_std": 0.5}
    run_mix(MixConfig(**settings, out=str(tmp_path / "mix")))
    expected, found = (hf_logits(folder, models.probe_tokens()) for folder in (seed, tmp_path / "mix"))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_a_mix_in_bf16_has_its_router_in_fp32(tmp_path: Path) -> None:
    """And as it was drawn: not one that was rounded in between."""
    seed = models.make_llama(tmp_path / "seed", dtype=torch.bfloat16)
    settings: dict[str, Any] = {"seed": str(seed), "experts": {"math": str(seed)}, "target": "btx_moe"}
    for name, dtype in (("narrow", None), ("wide", "float32")):
        run_mix(MixConfig(**settings, out=str(tmp_path / name), dtype=dtype))
    narrow, wide = load_folder(tmp_path / "narrow"), load_folder(tmp_path / "wide")
    for name, value in narrow.items():
        assert value.dtype == (torch.float32 if ".mlp.gate." in name else torch.bfloat16)
        if value.dtype == torch.float32:
            assert torch.equal(value, wide[name])


def feed_forward(mlp: Any, x: Tensor) -> Tensor:
    """W_down(silu(W_gate x) * W_up x), one token."""
    gate, up, down = (getattr(mlp, f"{part}_proj").weight.double() for part in ("gate", "up", "down"))
    inner = gate @ x
    return down @ (inner / (1 + torch.exp(-inner)) * (up @ x))


def naive_logits(router: Any, x: Tensor) -> Tensor:
    """One token's, from the papers' formulas."""
    if router.kind == "nexus":
        logits = []
        for domain in router.domain_embeddings.double():
            first, second = (router.w1.double() @ domain).chunk(2)
            embedding = router.w2.double() @ (first / (1 + torch.exp(-first)) * second)
            logits.append(x @ embedding)
        return torch.stack(logits)
    bias = [0.0, *router.penalty.tolist()] if router.kind == "flexolmo" and router.options.get("bias") else [0.0] * 4
    return torch.stack([x @ row + min(b, 0.0) for row, b in zip(router.weight.double(), bias)])


def naive_gates(router: Any, rows: list[Tensor], first_layer: bool) -> list[dict[int, Tensor]]:
    """Each token's gates, expert -> weight; the tokens are those of a pass, by position and then by sequence."""
    k, options, everything = router.top_k, router.options, range(4)
    if router.kind == "expert_choice":
        shares = [naive.softmax(row, list(everything)) for row in rows]
        gates: list[dict[int, Tensor]] = [{} for _ in rows]
        capacity = math.ceil(len(rows) / 4 * options.get("capacity_factor", 2.0))
        for expert in everything:
            for token in sorted(range(len(rows)), key=lambda t, e=expert: (-shares[t][e].item(), t))[:capacity]:
                gates[token][expert] = shares[token][expert]
        return gates
    if router.kind == "sample_top1" and not first_layer:
        return [{naive.best(row, list(everything), 1)[0]: torch.tensor(1.0).double()} for row in rows]
    share = options.get("softmax") == "before" and not options.get("renormalise", True)
    rule = {"soft": "soft", "sample_top1": "soft", "divmoe": "divmoe", "noisy_top_k": "top_k", "top_k": "top_k"}
    name = "share" if share else rule.get(router.kind, "share")
    gates = [naive.gates(name, row, k, groups=options.get("groups", 1)) for row in rows]
    if router.kind == "switch" and options["capacity_factor"]:
        room = dict.fromkeys(everything, math.ceil(len(rows) / 4 * options["capacity_factor"]))
        for row in gates:
            for expert in list(row):
                room[expert] -= 1
                if room[expert] < 0:
                    del row[expert]
    return gates


@torch.no_grad()
@pytest.mark.parametrize("shared", [None, "plain", "gated"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_block_is_a_loop_over_tokens(router: str, layer: int, shared: str | None) -> None:
    changes = dict(ROUTERS[router])
    if shared:
        changes |= {"shared_expert_intermediate_size": 24, "shared_expert_gate": shared == "gated"}
    block = make_model(seed=layer, **changes).model.layers[layer].mlp
    hidden_BSH = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(8)) / 2
    valid_BS = torch.ones(2, 9, dtype=torch.bool)
    valid_BS[1, :3] = False
    found, logits, selected = block(hidden_BSH, valid_BS)
    places = [(b, s) for s in range(9) for b in range(2) if valid_BS[b, s]]
    xs = [hidden_BSH[place].double() for place in places]
    rows = [naive_logits(block.gate, x) for x in xs]
    dropped = 0
    for place, x, row, gates in zip(places, xs, rows, naive_gates(block.gate, rows, layer == 0)):
        expected = sum(
            (gate * feed_forward(block.experts[e], x) for e, gate in gates.items()), torch.zeros(32).double()
        )
        if block.shared_expert is not None:
            factor: Any = 1.0
            if shared == "gated":
                factor = 1 / (1 + torch.exp(-(block.shared_expert_gate.weight.double() @ x)))
            expected = expected + factor * feed_forward(block.shared_expert, x)
        torch.testing.assert_close(found[place].double(), expected, atol=1e-5, rtol=1e-5)
        at = place[0] * 9 + place[1]
        torch.testing.assert_close(logits[at].double(), row, atol=1e-5, rtol=1e-5)
        chosen = set(selected[at].nonzero()[:, 0].tolist())
        assert chosen >= set(gates)
        dropped += len(chosen) - len(gates)
    assert (dropped > 0) == (router == "switch")
