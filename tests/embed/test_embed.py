"""Domain embeddings: from prepared data and from text, by the command; Nexus and FlexOlmo's rows read them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.encoded import read_shared
from btx_testing.models import make_llama
from btx_testing.tensors import load_folder, same_bits
from btx_testing.text import byte_tokenizer, sentence, write_jsonl

from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.data.prepare import prepare_data
from btx_nemo.data.tokenizer import load_encoder
from btx_nemo.embed.embedders import register_embedder
from btx_nemo.embed.run import embed_domains
from btx_nemo.errors import UserError
from btx_nemo.families import names
from btx_nemo.families.source import open_source
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 257}  # fmt: skip
DOMAINS = ("anchor", "math", "code", "law")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """seed, math, code, law: models; *.jsonl: texts of each domain; embeddings: of all of them."""
    root, rng = tmp_path_factory.mktemp("embed"), Random(3)
    for number, name in enumerate(("seed", "math", "code", "law")):
        make_llama(root / name, seed=number, **SIZES)
        byte_tokenizer(root / name)
    for number, name in enumerate(DOMAINS):
        write_jsonl(root / f"{name}.jsonl", [f"{name} " * (number + 1) + sentence(rng, 8) for _ in range(5)])
    embed_domains(root / "seed", {name: root / f"{name}.jsonl" for name in DOMAINS}, root / "embeddings", length=40)
    return root


def naive_row(model: Path, text: Path, length: int) -> torch.Tensor:
    """The mean over documents of the mean over tokens of the normed last hidden state, from the whole model."""
    from transformers import AutoModelForCausalLM

    network, encoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), load_encoder(model)
    rows = []
    for line in text.read_text().splitlines():
        ids = encoder.encode([json.loads(line)["text"]])[0][:length]
        with torch.no_grad():
            rows.append(network(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].mean(dim=0))
    return torch.stack(rows).mean(dim=0)


def test_a_row_is_the_mean_hidden_state_of_the_seed(world: Path) -> None:
    rows = load_folder(world / "embeddings")["domain_embeddings"]
    facts = json.loads((world / "embeddings" / "embeddings.json").read_text())
    assert facts["domains"] == list(DOMAINS) and facts["documents"] == dict.fromkeys(DOMAINS, 5)
    assert facts["embedder"] == "mean_hidden_state" and facts["size"] == 16 == rows.shape[1]
    assert facts["sha256"] == hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    assert facts["model"]["path"] == str((world / "seed").resolve())
    for name, row in zip(DOMAINS, rows, strict=True):
        torch.testing.assert_close(row, naive_row(world / "seed", world / f"{name}.jsonl", 40), atol=1e-5, rtol=1e-4)


def test_the_command_takes_prepared_data_and_a_checkpoint_and_says_the_same(
    world: Path, tmp_path: Path, commands: CommandServer
) -> None:
    import_hf(world / "seed", tmp_path / "ckpt")
    for name in ("math", "code"):
        prepare_data(
            [world / f"{name}.jsonl"], world / "seed", tmp_path / "data", name, append_eod=False, workers=1,
            validation_inputs=[world / "law.jsonl"],
        )  # fmt: skip
    pairs = [f"{name}={tmp_path / 'data' / name}" for name in ("math", "code")]
    arguments = [*pairs, "--model", str(tmp_path / "ckpt"), "--tokens", "40"]
    ended = commands.run("embed", *arguments, "--out", str(tmp_path / "out"))
    assert (ended.code, ended.out) == (0, ""), ended.err
    rows, expected = (load_folder(folder)["domain_embeddings"] for folder in (tmp_path / "out", world / "embeddings"))
    torch.testing.assert_close(rows, expected[1:3], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"domains": {"Math": "math.jsonl"}}, "Math: only a-z"),
        ({"domains": {"math": "nowhere.jsonl"}}, "nowhere.jsonl: no such file"),
        ({"domains": {"math": "empty.jsonl"}}, "empty.jsonl"),
        ({"embedder": "grit"}, "embedder=grit: unknown; known: mean_hidden_state"),
        ({"count": 0}, "documents=0 must be at least 1"),
        ({"model": "missing"}, "missing: no such folder"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(world: Path, tmp_path: Path, change: dict, message: str) -> None:
    (world / "empty.jsonl").write_text("")
    given = {"model": "seed", "domains": {"math": "math.jsonl"}, **change}
    domains = {name: world / path for name, path in given.pop("domains").items()}
    with pytest.raises(UserError, match=message):
        embed_domains(world / given.pop("model"), domains, tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())


def test_another_embedder_can_be_registered(world: Path, tmp_path: Path) -> None:
    register_embedder(
        "lengths", lambda model: lambda documents: torch.tensor([[float(len(d)), 1.0] for d in documents])
    )
    embed_domains(world / "seed", {"math": world / "math.jsonl"}, tmp_path / "out", embedder="lengths")
    assert load_folder(tmp_path / "out")["domain_embeddings"].shape == (1, 2)
    with pytest.raises(ValueError, match="registered already"):
        register_embedder("lengths", lambda model: lambda documents: torch.zeros(1))


def mix(world: Path, out: Path, recipe: str, seed: Path, experts: tuple[str, ...], **options: object) -> Path:
    paths = {name: str(world / name) for name in experts}
    run_mix(MixConfig(recipe=recipe, seed=str(seed), experts=paths, out=str(out), format="megatron", options=options))
    return out


def test_nexus(world: Path, tmp_path: Path) -> None:
    """The seed's block shared, the specialists' routed, a mean without the seed, rows by name."""
    out = mix(world, tmp_path / "mix", "nexus", world / "seed", ("code", "math"), embeddings=str(world / "embeddings"))
    tensors, model = read_shared(out), open_source(out).config
    seed, code, math = (read_shared(world / name) for name in ("seed", "code", "math"))
    rows = load_folder(world / "embeddings")["domain_embeddings"]
    moe = model.moe
    assert moe is not None and (moe.router, moe.top_k, moe.shared_expert_intermediate_size) == ("nexus", 1, 24)
    for layer in range(2):
        for part in names.PARTS:
            assert torch.equal(tensors[names.shared_expert(layer, part)], seed[names.ffn(layer, part)])
            for number, source in enumerate((code, math)):
                assert torch.equal(tensors[names.expert(layer, number, part)], source[names.ffn(layer, part)])
        assert torch.equal(tensors[names.router(layer, "domain_embeddings")], rows[[2, 1]])
        assert tensors[names.router(layer, "w1")].std() == pytest.approx(16**-0.5, rel=0.2)
        assert tensors[names.router(layer, "w2")].std() == pytest.approx(0.02, rel=0.2)
    for name in seed:
        assert names.parse_ffn(name) or torch.equal(tensors[name], (code[name] + math[name]) / 2)


def test_extending_nexus_leaves_rows_experts_and_projection_to_the_bit(world: Path, tmp_path: Path) -> None:
    embeddings = str(world / "embeddings")
    base = mix(world, tmp_path / "mix", "nexus", world / "seed", ("code", "math"), embeddings=embeddings)
    out = mix(world, tmp_path / "more", "extend", base, ("law",), embeddings=embeddings)
    before, after, law = read_shared(base), read_shared(out), read_shared(world / "law")
    for name, tensor in before.items():
        if names.parse_router(name) or names.parse_expert(name) or names.parse_shared_expert(name):
            assert torch.equal(after[name][: len(tensor)], tensor), name
        else:  # untrained, so that lambda = 1/3 gives the plain mean
            mean = sum(read_shared(world / each)[name].double() for each in ("code", "math", "law")) / 3
            torch.testing.assert_close(after[name].double(), mean, atol=1e-6, rtol=1e-5)
    assert torch.equal(after[names.expert(1, 2, "down")], law[names.ffn(1, "down")])
    half = mix(world, tmp_path / "half", "extend", base, ("law",), embeddings=embeddings, new_weight=0.0)
    kept = {name: tensor for name, tensor in read_shared(half).items() if name in before and "mlp.gate" not in name}
    assert same_bits(kept, {name: before[name] for name in kept})
    removed = mix(world, tmp_path / "removed", "remove", half, (), names=["law"])
    assert same_bits(read_shared(removed), before)
    with pytest.raises(UserError, match=r"recipe=add: not possible with moe\.router=nexus; use recipe=extend"):
        mix(world, tmp_path / "x", "add", base, ("law",))


def test_two_expert_rows_can_be_embeddings(world: Path, tmp_path: Path) -> None:
    embeddings = str(world / "embeddings")
    out = mix(world, tmp_path / "pair", "two_expert", world / "seed", ("math",), embeddings=embeddings)
    rows = load_folder(world / "embeddings")["domain_embeddings"]
    assert torch.equal(read_shared(out)[names.router(1)], rows[:2])


def test_embeddings_that_do_not_fit_are_refused(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "embeddings", tmp_path / "copy")
    table = json.loads((tmp_path / "copy" / "embeddings.json").read_text())
    table["domains"].remove("law")
    (tmp_path / "copy" / "embeddings.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match="does not have one row for each of anchor, math, code"):
        mix(world, tmp_path / "x", "nexus", world / "seed", ("math",), embeddings=str(tmp_path / "copy"))
    with pytest.raises(UserError, match="no embedding of 'prose'; it has anchor, math, code, law"):
        shutil.copytree(world / "math", world / "prose", dirs_exist_ok=True)
        mix(world, tmp_path / "x", "nexus", world / "seed", ("prose",), embeddings=str(world / "embeddings"))
    with pytest.raises(UserError, match="embeddings is required"):
        mix(world, tmp_path / "x", "nexus", world / "seed", ("math",))
    with pytest.raises(UserError, match="top_k=2: Nexus sends a token to one expert"):
        run_mix(
            MixConfig(
                recipe="nexus", seed=str(world / "seed"), experts={"math": str(world / "math")}, out="x", top_k=2,
                options={"embeddings": str(world / "embeddings")},
            )
        )  # fmt: skip
    assert not (tmp_path / "x").exists()
