"""Two-expert models, FlexOlmo's and BAR's merges, and operations on them: bits, denominators, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from btx_testing.encoded import make_encoded, read_shared
from btx_testing.shared import write_checkpoint
from btx_testing.tensors import load_folder, same_bits
from btx_testing.vectors import golden
from safetensors.torch import save_file

from btx_nemo.checkpoints.inspect import inspect_checkpoint, print_inspection
from btx_nemo.checkpoints.manifest import write_manifest
from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.families.source import open_source
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

Tensors = dict[str, torch.Tensor]
DOMAINS = ("math", "code", "tool", "safety")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def run(recipe: str, seed: Path, out: Path, experts: dict[str, Path] | None = None, **options: object) -> Path:
    run_mix(
        MixConfig(
            recipe=recipe,
            seed=str(seed),
            experts={name: str(path) for name, path in (experts or {}).items()},
            out=str(out),
            format="megatron",
            workers=2,
            options=dict(options),
        )
    )
    return out


def retrained(pair: Path, out: Path, change: Callable[[Tensors], None]) -> Path:
    """A two-expert model after a training that did `change`."""
    tensors = read_shared(pair)
    change(tensors)
    return write_checkpoint(out, open_source(pair).config, tensors)


def learn_domain(number: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if ".experts.1." in name:
                tensor += number
            if names.parse_router(name) and name.endswith("weight"):
                tensor[1] += number
            if name.endswith("penalty"):
                tensor -= number

    return change


def learn_shared(name: str, value: float, number: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        learn_domain(number)(tensors)
        tensors[name].fill_(value)

    return change


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """anchor; base; two-expert models: fresh (pair_*), FlexOlmo's training (flex_*), BAR's (bar_*)."""
    root = tmp_path_factory.mktemp("pairs")
    make_encoded(root / "anchor", 0)
    make_encoded(root / "base", 1)
    case = golden("bar.merge_shared")["inputs"]
    anchor = read_shared(root / "anchor")
    anchor[Q_PROJ].fill_(case["M"])
    write_checkpoint(root / "anchor_m", open_source(root / "anchor").config, anchor)
    for number, domain in enumerate(DOMAINS, 1):
        pair = run("two_expert", root / "anchor_m", root / f"pair_{domain}", {domain: root / "base"})
        retrained(pair, root / f"flex_{domain}", learn_domain(number))
        retrained(pair, root / f"bar_{domain}", learn_shared(Q_PROJ, case[domain], number))
    return root


def pairs(root: Path, kind: str, *domains: str) -> dict[str, Path]:
    return {domain: root / f"{kind}_{domain}" for domain in domains or DOMAINS}


def test_a_two_expert_model_has_the_anchor_s_shared_tensors_and_the_base_s_expert(root: Path) -> None:
    tensors, anchor, base = (read_shared(root / name) for name in ("pair_math", "anchor_m", "base"))
    moe = open_source(root / "pair_math").config.moe
    assert moe is not None and (moe.router, moe.experts, moe.top_k) == ("flexolmo", ["anchor", "math"], 2)
    for name, tensor in anchor.items():
        found = names.parse_ffn(name)
        if found:
            assert torch.equal(tensors[names.expert(found[0], 0, found[1])], tensor)
            assert torch.equal(tensors[names.expert(found[0], 1, found[1])], base[name])
        else:
            assert torch.equal(tensors[name], tensor)
    other = read_shared(root / "pair_code")
    for layer in range(2):
        mine, theirs = tensors[names.router(layer)], other[names.router(layer)]
        assert torch.equal(mine[0], theirs[0]), "one anchor row in all of them"
        assert not torch.equal(mine[1], theirs[1])
        assert tensors[names.router(layer, "penalty")].tolist() == [0.0]


def test_flexolmo_puts_experts_and_rows_side_by_side(root: Path, tmp_path: Path) -> None:
    mix = read_shared(run("flexolmo", root / "anchor_m", tmp_path / "mix", pairs(root, "flex")))
    anchor = read_shared(root / "anchor_m")
    for name, tensor in anchor.items():
        assert names.parse_ffn(name) or torch.equal(mix[name], tensor)
    for layer in range(2):
        rows = [read_shared(root / f"flex_{domain}")[names.router(layer)] for domain in DOMAINS]
        assert torch.equal(mix[names.router(layer)], torch.stack([rows[0][0], *(row[1] for row in rows)]))
        assert names.router(layer, "penalty") not in mix, "biases are dropped"
        for part in names.PARTS:
            assert torch.equal(mix[names.expert(layer, 0, part)], anchor[names.ffn(layer, part)])
            for number, domain in enumerate(DOMAINS, 1):
                trained = read_shared(root / f"flex_{domain}")[names.expert(layer, 1, part)]
                assert torch.equal(mix[names.expert(layer, number, part)], trained)
    kept = read_shared(run("flexolmo", root / "anchor_m", tmp_path / "kept", pairs(root, "flex"), keep_bias=True))
    assert kept[names.router(0, "penalty")].tolist() == [-1.0, -2.0, -3.0, -4.0]


def nudge(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        flat = tensors[name].view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf))

    return change


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        ("flexolmo", nudge(names.expert(1, 0, "down")), "anchor's expert must stay"),
        ("flexolmo", nudge("model.norm.weight"), "FlexOlmo trains nothing but"),
        ("flexolmo", nudge("lm_head.weight"), "lm_head.weight is not bit-identical .*use recipe=bar"),
        ("bar", nudge(names.expert(0, 0, "gate")), "experts.0.gate_proj.weight is not bit-identical"),
    ],
)
def test_one_bit_of_the_anchor_is_one_too_many(
    root: Path, tmp_path: Path, recipe: str, change: Callable[[Tensors], None], message: str
) -> None:
    moved = retrained(root / "flex_code", tmp_path / "moved", change)
    with pytest.raises(UserError, match=message) as caught:
        run(recipe, root / "anchor_m", tmp_path / "mix", {"math": root / "flex_math", "code": moved})
    assert str(moved) in str(caught.value) and not (tmp_path / "mix").exists()


def test_an_anchor_row_that_moved_is_refused(root: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[names.router(1)][0, 3] += 1

    moved = retrained(root / "flex_code", tmp_path / "moved", change)
    for recipe in ("flexolmo", "bar"):
        with pytest.raises(UserError, match="anchor's router row must be the same"):
            run(recipe, root / "anchor_m", tmp_path / "mix", {"math": root / "flex_math", "code": moved})


@pytest.mark.parametrize(("only_diverged", "key"), [(False, "default_all_domain"), (True, "only_diverged")])
def test_bar_averages_over_the_domains_without_the_anchor(
    root: Path, tmp_path: Path, only_diverged: bool, key: str
) -> None:
    out = run("bar", root / "anchor_m", tmp_path / "mix", pairs(root, "bar"), only_diverged=only_diverged)
    mix, anchor = read_shared(out), read_shared(root / "anchor_m")
    assert mix[Q_PROJ].unique().tolist() == [golden("bar.merge_shared")["expected"][key]]
    for name, tensor in anchor.items():
        assert names.parse_ffn(name) or name == Q_PROJ or torch.equal(mix[name], tensor)
    aside = sorted(path.name for path in (out / "shared_per_expert").iterdir())
    assert aside == ["manifest.json", "model.safetensors", "shared_per_expert.json"]


def test_removing_what_was_added_gives_back_the_mixture(root: Path, tmp_path: Path) -> None:
    """BAR's averages too, from what is kept aside; and adding is merging all at once."""
    three = run("bar", root / "anchor_m", tmp_path / "three", pairs(root, "bar", "math", "tool", "safety"))
    added = run("add", three, tmp_path / "added", pairs(root, "bar", "code"))
    at_once = run("bar", root / "anchor_m", tmp_path / "four", pairs(root, "bar", "math", "tool", "safety", "code"))
    assert same_bits(read_shared(added), read_shared(at_once))
    assert read_shared(added)[Q_PROJ].unique().tolist() == [1.75] != read_shared(three)[Q_PROJ].unique().tolist()
    removed = run("remove", added, tmp_path / "removed", names=["code"])
    assert same_bits(read_shared(removed), read_shared(three))
    for name in ("model.safetensors", "shared_per_expert.json"):
        kept = [(folder / "shared_per_expert" / name).read_bytes() for folder in (three, removed)]
        assert kept[0] == kept[1]
    first = run("remove", at_once, tmp_path / "without", names=["math", "tool"])
    expected = run("bar", root / "anchor_m", tmp_path / "two", pairs(root, "bar", "safety", "code"))
    assert same_bits(read_shared(first), read_shared(expected))


def test_opting_out_is_never_having_been_added(root: Path, tmp_path: Path) -> None:
    four = run("flexolmo", root / "anchor_m", tmp_path / "four", pairs(root, "flex"))
    without = run("remove", four, tmp_path / "without", names=["code"])
    expected = run("flexolmo", root / "anchor_m", tmp_path / "three", pairs(root, "flex", "math", "tool", "safety"))
    assert same_bits(read_shared(without), read_shared(expected))
    assert open_source(without).config == open_source(expected).config
    added = run("add", without, tmp_path / "added", pairs(root, "flex", "code"))
    again = run("remove", added, tmp_path / "again", names=["code"])
    assert same_bits(read_shared(again), read_shared(without))


def test_an_upgrade_changes_only_what_it_says(root: Path, tmp_path: Path) -> None:
    mix = run("flexolmo", root / "anchor_m", tmp_path / "mix", pairs(root, "flex"))
    newer = retrained(root / "flex_tool", tmp_path / "newer", learn_domain(100))
    upgraded = run("upgrade", mix, tmp_path / "upgraded", {"tool": newer})
    before, after = read_shared(mix), read_shared(upgraded)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        found = names.parse_expert(name)
        if found and found[1] == 3:
            assert torch.equal(tensor, before[name] + 100)
        elif names.parse_router(name):
            assert torch.equal(tensor[[0, 1, 2, 4]], before[name][[0, 1, 2, 4]])
            assert torch.equal(tensor[3], before[name][3] + 100)
        else:
            assert torch.equal(tensor, before[name]), name
    bar = run("bar", root / "anchor_m", tmp_path / "bar", pairs(root, "bar"))
    newer = retrained(root / "bar_math", tmp_path / "newer_bar", learn_shared(Q_PROJ, 11.0, 5))
    upgraded = run("upgrade", bar, tmp_path / "upgraded_bar", {"math": newer})
    expected = run("bar", root / "anchor_m", tmp_path / "expected", pairs(root, "bar") | {"math": newer})
    assert same_bits(read_shared(upgraded), read_shared(expected))
    assert read_shared(upgraded)[Q_PROJ].unique().tolist() == [(11 + 2 + 1 + 1) / 4]


def test_a_bar_mixture_without_what_was_kept_aside_is_not_guessed_at(root: Path, tmp_path: Path) -> None:
    bar = run("bar", root / "anchor_m", tmp_path / "bar", pairs(root, "bar", "math", "tool", "safety"))
    trained = write_checkpoint(tmp_path / "trained", open_source(bar).config, read_shared(bar))
    with pytest.raises(UserError, match=r"not bit-identical .*for a BAR mixture give aside=DIR"):
        run("add", trained, tmp_path / "x", pairs(root, "bar", "code"))
    added = run("add", trained, tmp_path / "y", pairs(root, "bar", "code"), aside=str(bar / "shared_per_expert"))
    assert read_shared(added)[Q_PROJ].unique().tolist() == [1.75]
    shutil.rmtree(bar / "shared_per_expert")
    with pytest.raises(UserError, match="shared_per_expert"):
        run("add", trained, tmp_path / "z", pairs(root, "bar", "code"), aside=str(bar / "shared_per_expert"))


def test_what_another_mixture_kept_aside_is_refused(root: Path, tmp_path: Path) -> None:
    bar = run("bar", root / "anchor_m", tmp_path / "bar", pairs(root, "bar", "math", "tool"))
    other = run("bar", root / "anchor_m", tmp_path / "other", pairs(root, "bar", "math", "code"))
    flex = run("flexolmo", root / "anchor_m", tmp_path / "flex", pairs(root, "flex", "math", "tool"))
    namesake = {"math": root / "bar_math", "tool": root / "bar_code"}
    moved = run("bar", root / "anchor_m", tmp_path / "moved", namesake)
    aside, before = str(bar / "shared_per_expert"), sorted(tmp_path.iterdir())
    for mixture, message in (
        (other, "keeps the shared tensors of math, tool, but the mixture has math, code, router=flexolmo; give"),
        (moved, "moved: .*q_proj.weight is not bit-identical to mean.*kept by another mixture"),
        (flex, "flex: .*q_proj.weight is not bit-identical to mean.*kept by another mixture"),
    ):
        with pytest.raises(UserError, match=message):
            run("remove", mixture, tmp_path / "x", names=["math"], aside=aside)
    tensors = load_folder(bar / "shared_per_expert")
    damaged = shutil.copytree(bar / "shared_per_expert", tmp_path / "damaged")
    for change in ({f"law:{Q_PROJ}": tensors[f"math:{Q_PROJ}"].clone()}, {f"math:{Q_PROJ}": torch.ones(2, 2)}):
        save_file(tensors | change, damaged / "model.safetensors")
        write_manifest(damaged, kind="shared_per_expert")
        with pytest.raises(UserError, match=f"tensor '{next(iter(change))}' .* is none of the mixture's"):
            run("remove", bar, tmp_path / "x", names=["math"], aside=str(damaged))
    assert sorted(tmp_path.iterdir()) == sorted([*before, damaged])


def test_removing_from_a_mixture_of_unknown_origin_says_what_may_stay(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bar = run("bar", root / "anchor_m", tmp_path / "bar", pairs(root, "bar", "math", "tool"))
    trained = write_checkpoint(tmp_path / "trained", open_source(bar).config, read_shared(bar))
    run("remove", bar, tmp_path / "x", names=["math"])
    assert "does not say" not in caplog.text
    run("remove", trained, tmp_path / "y", names=["math"])
    assert "trained: does not say which recipe made it; if it was bar" in caplog.text


def test_the_history_goes_through_a_training_unless_another_mixture_is_there(root: Path, tmp_path: Path) -> None:
    """A relative init_from is from where the run's relative out is, not from where the mix is made."""
    bar = run("bar", root / "anchor_m", tmp_path / "runs" / "bar", pairs(root, "bar", "math", "tool"))
    out = tmp_path / "runs" / "joint"
    trained = write_checkpoint(out / "checkpoints" / "step_1", open_source(bar).config, read_shared(bar))

    def history(init_from: str, place: str) -> list[str]:
        (out / "resolved.yaml").write_text(f"{{init_from: {init_from}, out: {place}}}")
        target = tmp_path / f"removed{len(list(tmp_path.iterdir()))}"
        run("remove", trained, target, names=["math"], aside=str(bar / "shared_per_expert"))
        return [entry["recipe"] for entry in json.loads((target / "manifest.json").read_text())["history"]]

    assert history("runs/bar", "runs/joint") == history("runs/bar", "./runs/joint/") == ["bar", "remove"]
    assert history(str(bar), str(out)) == history(str(bar), "elsewhere/joint") == ["bar", "remove"]
    assert history("runs/bar", str(out)) == history("runs/bar", "other/joint") == ["remove"]
    bar.rename(tmp_path / "kept")
    other = run("bar", root / "anchor_m", bar, pairs(root, "bar", "math", "code"))
    shutil.rmtree(other / "shared_per_expert")
    shutil.copytree(tmp_path / "kept" / "shared_per_expert", bar / "shared_per_expert")
    assert history("runs/bar", "runs/joint") == ["remove"]


def test_the_history_is_kept_and_shown(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mix = run("flexolmo", root / "anchor_m", tmp_path / "mix", pairs(root, "flex", "math", "code"))
    added = run("add", mix, tmp_path / "added", pairs(root, "flex", "tool"))
    removed = run("remove", added, tmp_path / "removed", names=["math"])
    history = json.loads((removed / "manifest.json").read_text())["history"]
    assert [entry["recipe"] for entry in history] == ["flexolmo", "add", "remove"]
    assert [entry["result"][1:] for entry in history] == [["math", "code"], ["math", "code", "tool"], ["code", "tool"]]
    capsys.readouterr()
    facts = inspect_checkpoint(removed)
    origins = {expert["name"]: Path(expert["origin"] or "").name for expert in facts["moe"]["experts"]}
    assert origins["code"] == "flex_code" and origins["tool"] == "flex_tool"
    print_inspection(facts)
    shown = capsys.readouterr().out
    assert f"  2. add of {mix} with tool={root / 'flex_tool'}" in shown and "(names=['math'])" in shown
    assert "next: nothing; a short training of the router may help" in shown


def test_dense_specialists_are_added_with_fresh_rows(root: Path, tmp_path: Path) -> None:
    run_mix(
        MixConfig(
            seed=str(root / "anchor"),
            experts={"math": str(root / "base")},
            out=str(tmp_path / "mix"),
            format="megatron",
        )
    )
    mix = tmp_path / "mix"
    added = run("add", mix, tmp_path / "added", {"law": root / "base", "art": root / "anchor"})
    before, after = read_shared(mix), read_shared(added)
    assert open_source(added).config.moe.experts == ["math", "generalist", "law", "art"]  # type: ignore[union-attr]
    for name, tensor in before.items():
        assert torch.equal(after[name][:2] if names.parse_router(name) else after[name], tensor)
    rows = after[names.router(0)][2:]
    assert not torch.equal(rows[0], rows[1]) and 0.005 < rows.std() < 0.05
    assert torch.equal(after[names.expert(1, 2, "up")], read_shared(root / "base")[names.ffn(1, "up")])
    removed = run("remove", added, tmp_path / "removed", names=["law", "art"])
    assert same_bits(read_shared(removed), before)
    upgraded = run("upgrade", mix, tmp_path / "upgraded", {"math": root / "anchor"})
    changed = [name for name, tensor in read_shared(upgraded).items() if not torch.equal(tensor, before[name])]
    assert changed == [name for name in before if ".experts.0." in name]


def test_top_k_is_clamped_to_what_is_left(root: Path, tmp_path: Path) -> None:
    mix = run("flexolmo", root / "anchor_m", tmp_path / "mix", pairs(root, "flex"))
    assert open_source(mix).config.moe.top_k == 5  # type: ignore[union-attr]
    removed = run("remove", mix, tmp_path / "removed", names=["math", "code", "tool"])
    assert open_source(removed).config.moe.top_k == 2  # type: ignore[union-attr]


def test_a_whole_domain_leaves_a_mixture_of_slices(root: Path, tmp_path: Path) -> None:
    experts = {"math": root / "base", "code": root / "anchor", "law": root / "base"}
    mix = run("divmoe", root / "anchor", tmp_path / "mix", experts)
    removed = run("remove", mix, tmp_path / "removed", names=["math"])
    moe = open_source(removed).config.moe
    assert moe is not None and (moe.options, moe.num_experts, moe.top_k) == ({"groups": 2}, 4, 2)
    before, after = read_shared(mix), read_shared(removed)
    assert torch.equal(after[names.router(1)], before[names.router(1)][2:])
    assert torch.equal(after[names.expert(0, 1, "up")], before[names.expert(0, 3, "up")])
    with pytest.raises(UserError, match="a slice cannot leave its domain"):
        run("remove", mix, tmp_path / "x", names=["math.0"])


@pytest.mark.parametrize(
    ("recipe", "seed", "experts", "options", "message"),
    [
        ("add", "anchor_m", {"law": "base"}, {}, "is a dense model; recipe=add changes a mixture"),
        ("add", "flex", {"math": "base"}, {}, "experts.math: the mixture has an expert of that name"),
        ("add", "pair_math", {"law": "base"}, {}, "not possible with a router bias; merge with keep_bias=false"),
        ("upgrade", "flex", {"law": "base"}, {}, "no expert 'law' in the mixture; it has anchor, math, code"),
        ("upgrade", "flex", {"anchor": "base"}, {}, "experts.anchor: all experts were trained beside the anchor"),
        ("remove", "flex", {}, {"names": ["law"]}, "names=law: no such expert; the mixture has anchor, math, code"),
        ("remove", "flex", {}, {"names": []}, "names=.*none given"),
        ("remove", "flex", {}, {"names": ["anchor"]}, "names=anchor: the other experts were trained beside it"),
        ("remove", "flex", {"law": "base"}, {"names": ["math"]}, "experts.law: recipe=remove takes no specialists"),
        ("extend", "flex", {"law": "base"}, {"embeddings": "nowhere"}, "nowhere: no embeddings.json"),
        ("flexolmo", "anchor_m", {"math": "base"}, {}, "is a dense model; recipe=flexolmo merges mixtures"),
        ("bar", "anchor_m", {"math": "flex"}, {}, "is a mixture of 3 experts with router=flexolmo; expected an anchor"),
        ("two_expert", "anchor_m", {"anchor": "base"}, {}, "experts.anchor: is the name of the seed's own expert"),
        ("two_expert", "anchor_m", {"a": "base", "b": "base"}, {}, "takes one specialist, not 2"),
    ],
)
def test_wrong_operations_are_one_line(
    root: Path, tmp_path: Path, recipe: str, seed: str, experts: dict[str, str], options: dict, message: str
) -> None:
    if not (root / "flex").exists():
        run("flexolmo", root / "anchor_m", root / "flex", pairs(root, "flex", "math", "code"))
    paths = {name: root / folder for name, folder in experts.items()}
    with pytest.raises(UserError, match=message) as caught:
        run(recipe, root / seed, tmp_path / "out", paths, **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_rows_that_were_trained_in_fp32_stay_so_in_a_bf16_mixture(root: Path, tmp_path: Path) -> None:
    """As Megatron leaves them; and a dtype that is asked for holds for all."""
    anchor = {name: tensor.bfloat16() for name, tensor in read_shared(root / "anchor_m").items()}
    write_checkpoint(tmp_path / "anchor", open_source(root / "anchor_m").config, anchor)
    pair = run("two_expert", tmp_path / "anchor", tmp_path / "pair", {"math": tmp_path / "anchor"})
    tensors = read_shared(pair)
    for name in [name for name in tensors if names.parse_router(name)]:
        tensors[name] = tensors[name].float() + 1e-5
    trained = write_checkpoint(tmp_path / "trained", open_source(pair).config, tensors)
    mix = read_shared(run("flexolmo", tmp_path / "anchor", tmp_path / "mix", {"math": trained}))
    assert (
        torch.equal(mix[names.router(0)], tensors[names.router(0)]) and mix["model.norm.weight"].dtype == torch.bfloat16
    )
    added = read_shared(run("add", tmp_path / "mix", tmp_path / "added", {"law": tmp_path / "anchor"}))
    assert added[names.router(1)].dtype == torch.float32
    assert torch.equal(added[names.router(1)][:2], mix[names.router(1)])
    run_mix(
        MixConfig(
            recipe="add", seed=str(tmp_path / "mix"), experts={"law": str(tmp_path / "anchor")},
            out=str(tmp_path / "cast"), dtype="bfloat16", format="megatron",
        )
    )  # fmt: skip
    assert {tensor.dtype for tensor in read_shared(tmp_path / "cast").values()} == {torch.bfloat16}
