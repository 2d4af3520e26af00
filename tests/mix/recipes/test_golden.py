"""Numbers from the papers, reproduced by the recipes' own plans and helpers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from btx_testing.shared import SMALLEST, apply_recipe, random_tensors
from btx_testing.vectors import golden
from torch.nn.functional import silu

from btx_nemo.embed.run import domain_row
from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.mix.recipes.divmoe import complementarity
from btx_nemo.mix.recipes.nvidia_upcycling import activation_scale, part_scale
from btx_nemo.plan import evaluate as evaluation
from btx_nemo.plan import statistics
from btx_nemo.plan.expr import generator_for
from btx_nemo.routers.functional import grouped_top_k_gates, top_k_gates

NORM = "model.norm.weight"


def with_norms(*values: list[float] | float) -> dict[str, dict[str, torch.Tensor]]:
    """Sources s0, s1, ... that differ in the final norm alone."""
    tensors = random_tensors(SMALLEST, 0)
    return {f"s{n}": {**tensors, NORM: torch.tensor(value).expand(4).clone()} for n, value in enumerate(values)}


def test_btx_averages_over_all_with_the_seed() -> None:
    case = golden("btx.average_nonffn")
    seed, *experts = case["inputs"]["theta"]
    assert apply_recipe("btx", with_norms(seed, *experts))[NORM].tolist() == [case["expected"]["mean"]] * 4


def test_divmoe_averages_over_the_specialists_and_the_base() -> None:
    case = golden("divmoe.shared_mean")
    sources = with_norms(case["inputs"]["base"], *case["inputs"]["specs"])
    assert apply_recipe("divmoe", sources)[NORM].tolist() == [case["expected"]["shared"]] * 4


def block(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return down @ (silu(gate @ x) * (up @ x))


def test_btx_split_chunks_sum_to_the_block() -> None:
    case = golden("btx.split_experts")
    x, *given = (torch.tensor(case["inputs"][key], dtype=torch.float64) for key in ("x", "Wg", "Wu", "Wd"))
    tensors = {name: tensor.double() for name, tensor in random_tensors(SMALLEST, 0).items()}
    for part, matrix in zip(names.PARTS, given, strict=True):  # four columns or rows more, which x does not see
        wide = torch.zeros(4, 4, dtype=torch.float64)
        wide[: matrix.shape[0], : matrix.shape[1]] = matrix
        tensors[names.ffn(0, part)] = wide
    mix = apply_recipe("btx", {"seed": tensors, "math": tensors}, variant="split", include_seed=False)
    x = torch.cat((x, torch.zeros(2, dtype=torch.float64)))
    chunks = [block(x, *(mix[names.expert(0, e, part)] for part in names.PARTS))[:2] for e in (0, 1)]
    expected = {key: torch.tensor(value, dtype=torch.float64) for key, value in case["expected"].items()}
    torch.testing.assert_close(torch.stack(chunks), expected["chunks"], atol=case["atol"], rtol=0)
    torch.testing.assert_close(sum(chunks), expected["full"], atol=case["atol"], rtol=0)
    torch.testing.assert_close(sum(chunks) / 2, expected["half"], atol=case["atol"], rtol=0)


def test_btx_blend_takes_a_chunk_of_every_domain() -> None:
    case = golden("btx.blend_index_map")
    sources = {f"dom{n}": random_tensors(SMALLEST, n) for n in range(case["inputs"]["N"])}
    seed = {"seed": random_tensors(SMALLEST, 9)}
    mix = apply_recipe("btx", {**seed, **sources}, variant="blend", include_seed=False)
    for e, name in enumerate(("expert0", "expert1")):
        for part in names.PARTS:
            rows = [
                (sources[domain][names.ffn(1, part)].T if part == "down" else sources[domain][names.ffn(1, part)])[n]
                for domain, neurons in case["expected"][name]
                for n in neurons
            ]
            matrix = mix[names.expert(1, e, part)]
            assert torch.equal(matrix.T if part == "down" else matrix, torch.stack(rows))


def test_sparse_upcycling() -> None:
    case = golden("sparse_upcycling.init_equivalence")
    z, k = torch.tensor([case["inputs"]["z"]], dtype=torch.float64), case["inputs"]["k"]
    after = float(top_k_gates(z, k)[0].sum())
    before = float(top_k_gates(z, k, softmax_before=True, renormalise=False)[0].sum())
    assert after == pytest.approx(case["expected"]["sum_post"], abs=1e-12)
    assert before == pytest.approx(case["expected"]["sum_pre"], abs=1e-12)
    case = golden("sparse_upcycling.layer_pattern")
    model = dataclasses.replace(SMALLEST, num_layers=case["inputs"]["L"])
    tensors = {"seed": random_tensors(model, 0)}
    for every, key in ((2, "moe_layers"), (1, "btx_baseline_layers")):
        mix = apply_recipe("sparse_upcycling", tensors, model, copies=2, every=every)
        assert [n for n in range(12) if names.router(n) in mix] == case["expected"][key]


def test_nvidia_scales() -> None:
    case = golden("nvidia.weight_scale")
    for n, (expansion, granularity, top_k) in enumerate(case["inputs"]["cases"]):
        for softmax, key in (("before", "pre"), ("after", "post")):
            scale = activation_scale(expansion, granularity, top_k, softmax)
            assert scale == case["expected"][f"{key}_s"][n]
            for part in names.PARTS:
                gamma = part_scale("cuberoot", scale, part)
                assert gamma == pytest.approx(case["expected"][f"{key}_gamma"][n], abs=1e-12)
            assert [part_scale("exact_down", scale, part) for part in names.PARTS] == [1, 1, scale]


def test_nvidia_router_layout() -> None:
    case = golden("nvidia.router_layout")
    copies, shards = case["inputs"]["E"], case["inputs"]["G"]
    mix = apply_recipe(
        "nvidia_upcycling", {"seed": random_tensors(SMALLEST, 0)}, expansion=copies, granularity=shards
    )  # fmt: skip
    rows = mix[names.router(0)]
    fresh = torch.empty(copies * shards, 4).normal_(0, 0.02, generator=generator(names.router(0)))
    order = [[1.0, 0.0], [0.0, 1.0]]
    expected = [order.index(row) for row in case["expected"]["W_init"]]
    assert torch.equal(rows, fresh[expected]), "the first E rows of a random init, each G times"


def generator(name: str) -> torch.Generator:
    return generator_for(0, name)


def test_divmoe_scales() -> None:
    """Exact on squared ReLU, which is homogeneous; eq. 5 gives four times the dense output."""
    case = golden("divmoe.scale_mismatch")
    paper = part_scale("cuberoot", activation_scale(4, 2, 2, "before"), "gate")
    consistent = part_scale("cuberoot", activation_scale(4, 2, 2, "after"), "gate")
    assert paper == pytest.approx(case["expected"]["gamma_paper"], abs=1e-12)
    assert consistent == pytest.approx(case["expected"]["gamma_consistent"], abs=1e-12)
    x, first, second = (torch.tensor(case["inputs"][key], dtype=torch.float64) for key in ("x", "W1", "W2"))
    for gamma, key in ((paper, "out_gamma_paper"), (consistent, "out_gamma_consistent")):
        shards = [(gamma * second[:, s]) @ (gamma * first[s] @ x).relu().square() for s in (slice(0, 2), slice(2, 4))]
        expected = torch.tensor(case["expected"][key], dtype=torch.float64)
        torch.testing.assert_close(sum(shards) / 2, expected, atol=1e-9, rtol=0)
    case = golden("divmoe.swiglu_cuberoot_error")
    z = torch.tensor(case["inputs"]["z"], dtype=torch.float64)
    ratio = silu(case["inputs"]["gamma"] * z) / (case["inputs"]["gamma"] * silu(z))
    assert ratio.tolist() == pytest.approx(case["expected"]["ratio"], abs=1e-12)


def test_divmoe_modes_on_weights() -> None:
    sources = {name: random_tensors(SMALLEST, n) for n, name in enumerate(("seed", "a", "b", "c", "d"))}
    for mode, factors in {
        "exact_down": (1, 1, 2),
        "cuberoot_consistent": (2 ** (1 / 3),) * 3,
        "paper": (2, 2, 2),
    }.items():
        mix = apply_recipe("divmoe", sources, scale_mode=mode)
        for part, factor in zip(names.PARTS, factors, strict=True):
            dense = sources["b"][names.ffn(1, part)]
            shard = dense[:, 2:] if part == "down" else dense[2:]
            torch.testing.assert_close(mix[names.expert(1, 3, part)], factor * shard, atol=1e-6, rtol=1e-6)


def test_divmoe_complementarity() -> None:
    """Against the analytic m!/m^m for independent scores, 2/3 for a fixed preference, 1 for tied packs."""
    expected = golden("divmoe.complementarity_prob")["expected"]
    for m, p in zip(golden("divmoe.complementarity_prob")["inputs"]["m"], expected["p"], strict=True):
        shares = []
        for seed in range(40):
            rows = torch.randn(m * m, 256, generator=torch.Generator().manual_seed(seed))
            shares.append(complementarity(rows, m, m, [n % m for n in range(m * m)], seed))
        assert sum(shares) / len(shares) == pytest.approx(p, abs=0.02)
        assert p == pytest.approx(math.factorial(m) / m**m)
    # pack-tied rows, n = 4, m = 2: pairs of groups share a row, and group i's slot holds shard (slot + i) mod 2
    rows = torch.randn(2, 32).repeat_interleave(4, dim=0)
    assert complementarity(rows, 4, 2, [(n % 2 + n // 2) % 2 for n in range(8)]) == expected["pack_tied"]
    assert complementarity(rows, 4, 2, [n % 2 for n in range(8)]) == 0, "tied without the shift: the same shard twice"


def test_divmoe_sizes() -> None:
    case = golden("divmoe.size_factors")
    n, m, k = (case["inputs"][key] for key in "nmk")
    sources = {name: random_tensors(SMALLEST, i) for i, name in enumerate(("seed", *"abcd"))}
    mix = apply_recipe("divmoe", sources, slices=m, top_k=k)
    width = mix[names.expert(0, 0, "gate")].shape[0]
    experts = {names.parse_expert(name)[1] for name in mix if names.parse_expert(name)}  # type: ignore[index]
    assert len(experts) == case["expected"]["N"] == n * m
    assert len(experts) * width / SMALLEST.ffn_hidden_size == case["expected"]["expansion"]
    assert k * width / SMALLEST.ffn_hidden_size == case["expected"]["active_ratio"]


def test_drop_upcycling_draws_from_the_chosen_part_s_own_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's example, with its neurons and its standard normals in the place of ours."""
    case = golden("dropup.reinit")
    chosen = torch.tensor(case["inputs"]["S"])
    down = torch.tensor(case["inputs"]["W_down"])
    for module in (evaluation, statistics):
        monkeypatch.setattr(module, "chosen", lambda seed, choice, length: chosen)
    model = dataclasses.replace(SMALLEST, ffn_hidden_size=6, num_layers=1)
    tensors = random_tensors(model, 0)
    tensors[names.ffn(0, "down")] = down
    mix = apply_recipe("drop_upcycling", {"seed": tensors}, model, copies=1, ratio=0.5)
    target = names.expert(0, 0, "down")
    normals = torch.empty(4, 6).normal_(generator=generator(target))
    part = down[:, chosen].double()
    expected = down.double().clone()
    expected[:, chosen] = part.mean() + part.std() * normals[:, chosen].double()
    torch.testing.assert_close(mix[target].double(), expected, atol=1e-6, rtol=0)
    given = part.mean() + part.std() * torch.tensor(case["inputs"]["normals"], dtype=torch.float64)
    golden_new = torch.tensor(case["expected"]["W_new"], dtype=torch.float64)
    torch.testing.assert_close(golden_new[:, chosen], given, atol=1e-6, rtol=0)
    kept = [n for n in range(6) if n not in chosen.tolist()]
    assert torch.equal(mix[target][:, kept], down[:, kept])


def test_drop_upcycling_s_expected_overlap() -> None:
    case = golden("dropup.expected_retention")
    model = dataclasses.replace(SMALLEST, ffn_hidden_size=400, num_layers=1)
    tensors = random_tensors(model, 0)
    for ratio, one, two in zip(case["inputs"]["r"], case["expected"]["one"], case["expected"]["two"], strict=True):
        mix = apply_recipe("drop_upcycling", {"seed": tensors}, model, copies=2, ratio=float(ratio))
        kept = [
            (mix[names.expert(0, e, "up")] == tensors[names.ffn(0, "up")]).all(dim=1) for e in (0, 1)
        ]  # fmt: skip
        assert [float(each.float().mean()) for each in kept] == [one, one]
        assert float((kept[0] & kept[1]).float().mean()) == pytest.approx(two, abs=0.08)


def test_task_arithmetic_and_soup() -> None:
    case = golden("merge.task_arithmetic")
    base = case["inputs"]["theta0"]
    tuned = [[b + t for b, t in zip(base, tau, strict=True)] for tau in case["inputs"]["tau"]]
    merged = apply_recipe("task_arithmetic", with_norms(base, *tuned), scale=case["inputs"]["lam"])[NORM]
    assert merged.tolist() == pytest.approx(case["expected"]["theta"], abs=1e-6)
    case = golden("merge.uniform_soup")
    values = [[*v, 0.0, 0.0] for v in (case["inputs"]["seed"], *case["inputs"]["thetas"])]
    for include_seed, key in ((False, "experts_only"), (True, "with_seed")):
        merged = apply_recipe("average", with_norms(*values), include_seed=include_seed)[NORM]
        assert merged[:2].tolist() == case["expected"][key]


def test_a_domain_s_row_is_the_mean_of_its_documents_without_nan() -> None:
    case = golden("flexolmo.domain_embedding")
    rows = [row or [math.nan, math.nan] for row in case["inputs"]["emb"]]
    assert domain_row(torch.tensor(rows), "math").tolist() == case["expected"]["r"]
    with pytest.raises(UserError, match="math: the embedding of every document is NaN"):
        domain_row(torch.tensor([[math.nan, 1.0]]), "math")


def test_algorithm_1_sees_the_groups_of_the_recipe() -> None:
    """The recipe's group-major numbering is the router's."""
    case = golden("divmoe.alg1")
    scores = torch.tensor(case["inputs"]["S"]).flatten()[None]
    gates, selected = grouped_top_k_gates(scores, 4, case["inputs"]["k"])
    found = [[n // 2, n % 2] for n in selected[0].nonzero().flatten().tolist()]
    assert found == case["expected"]["selected"]
    assert gates[0][selected[0]].tolist() == pytest.approx(case["expected"]["weights"], abs=1e-6)
