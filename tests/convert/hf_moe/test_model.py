"""The model by itself: caches, padding, generation, saving, gradients, dtypes, and weights that are not there."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing.hf_moe import FAMILIES, OF_A_PASS, ROUTERS, SIZES, make_model, pairs, tokens
from btx_testing.tensors import load_folder, same_bits
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig

import btx_nemo
from btx_nemo.convert.hf_moe import configuration_btx_moe, routing_btx_moe
from btx_nemo.convert.hf_moe.configuration_btx_moe import BtxMoeConfig
from btx_nemo.convert.hf_moe.modeling_btx_moe import CACHE, BtxMoeForCausalLM, BtxMoeModel
from btx_nemo.errors import UserError
from btx_nemo.families import btx_moe
from btx_nemo.families.architecture import read_config
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.routers import functional, router_names
from btx_nemo.routers.losses import Decision, switch

SHAPES = {name: FAMILIES[name] for name in ("llama", "mistral", "qwen3", "olmo3")}
MORE = {
    "shared_expert_intermediate_size": 24,
    "moe_layers": [1, 2],
    "num_hidden_layers": 4,
    "dense_intermediate_size": 56,
}


@torch.no_grad()
def logits_of(model: Any, ids: Tensor, **more: Any) -> Tensor:
    return model(ids, **more).logits


def close(a: Tensor, b: Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize(("router", "shape"), pairs([name for name in ROUTERS if name not in OF_A_PASS], SHAPES))
def test_a_cache_changes_nothing(router: str, shape: str) -> None:
    model, ids = make_model(**ROUTERS[router], **SHAPES[shape]), tokens()
    expected = logits_of(model, ids)
    cache = DynamicCache(config=model.config)
    (name,) = CACHE
    parts = [ids[:, :5], ids[:, 5:6], ids[:, 6:17], ids[:, 17:18], ids[:, 18:]]
    close(torch.cat([logits_of(model, part, **{name: cache}) for part in parts], dim=1), expected)
    greedy = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    words = model.generate(ids, **greedy)
    assert torch.equal(words, model.generate(ids, use_cache=False, **greedy))
    assert torch.equal(words[:, 24], expected[:, -1].argmax(dim=-1))


@pytest.mark.parametrize(("router", "shape"), pairs(ROUTERS, SHAPES))
def test_left_padding_changes_nothing(router: str, shape: str) -> None:
    """Nor does it take anybody's place in an expert with a capacity."""
    model = make_model(**ROUTERS[router], **SHAPES[shape])
    long, short = tokens(1, 20), tokens(1, 13, seed=5)
    pad = torch.zeros(1, 7, dtype=torch.long)
    padded, mask = torch.cat((pad, short), dim=1), torch.cat((pad, torch.ones_like(short)), dim=1)
    close(logits_of(model, padded, attention_mask=mask)[:, 7:], logits_of(model, short))
    if router in OF_A_PASS:
        return
    both = torch.cat((long, padded)), torch.cat((torch.ones_like(long), mask))
    found = logits_of(model, both[0], attention_mask=both[1])
    close(found[:1], logits_of(model, long))
    close(found[1:, 7:], logits_of(model, short))
    words = model.generate(both[0], attention_mask=both[1], max_new_tokens=10, do_sample=False)
    alone = [
        model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=10, do_sample=False) for x in (long, short)
    ]
    assert torch.equal(words[:, 20:], torch.cat((alone[0][:, 20:], alone[1][:, 13:])))


def test_capacity_drops_in_order_of_position_over_the_batch() -> None:
    """As Megatron has it: all first tokens before any second one; and it is felt."""
    model = make_model(**ROUTERS["switch"])
    router = model.model.layers[0].mlp.gate
    hidden_TH = torch.randn(24, 32, generator=torch.Generator().manual_seed(2))
    _, _, selected_TE, kept_TE = router(hidden_TH, None)
    for expert in range(4):
        chosen = selected_TE[:, expert].nonzero()[:, 0].tolist()
        assert kept_TE[:, expert].nonzero()[:, 0].tolist() == chosen[:6]
    assert kept_TE.sum() < selected_TE.sum()
    ids = tokens(4, 6)
    together, alone = logits_of(model, ids), torch.cat([logits_of(model, row[None]) for row in ids])
    assert (together - alone).abs().max() > 1e-3


def test_expert_choice_refuses_a_cache() -> None:
    model, ids = make_model(**ROUTERS["expert_choice"]), tokens()
    words = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert torch.equal(words[:, -1], logits_of(model, words[:, :-1])[:, -1].argmax(dim=-1))
    with pytest.raises(ValueError, match="looks at all tokens of a pass: give use_cache=False"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, use_cache=True)


@pytest.mark.parametrize(
    "how", [{"do_sample": True, "top_k": 20}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True}]
)
def test_sampling_and_beams(how: dict[str, Any]) -> None:
    model, ids = make_model(**ROUTERS["divmoe"]), tokens(2, 6)
    torch.manual_seed(0)
    words = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **how)
    assert words.shape == (2, 14) and torch.equal(words[:, :6], ids)
    torch.manual_seed(0)
    again = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, use_cache=False, **how)
    assert torch.equal(words, again)
    if how == {"num_beams": 3}:  # no worse than greedy, by the model's own account
        greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        scores = [logits_of(model, x)[:, 5:-1].log_softmax(-1).gather(2, x[:, 6:, None]).sum() for x in (words, greedy)]
        assert scores[0] >= scores[1] - 1e-4


def test_a_static_cache_is_a_cache() -> None:
    ids = tokens(2, 6)
    for shape in SHAPES.values():
        model = make_model(**ROUTERS["divmoe"], **shape)
        how = dict(attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        static = model.generate(ids, cache_implementation="static", disable_compile=True, **how)
        assert torch.equal(static, model.generate(ids, **how))


@pytest.mark.parametrize("inference", ["argmax", "hard"])
def test_sample_top1_at_inference(inference: str) -> None:
    """Soft in the first layer; then weight one on the largest logit, or on a draw from the softmax."""
    options = {**ROUTERS["sample_top1"], "router_options": {"inference": inference}}
    layers = make_model(**options).model.layers
    hidden_TH = torch.randn(1, 32, generator=torch.Generator().manual_seed(2)).expand(20000, 32) / 4
    logits_TE, gates_TE, selected_TE, _ = layers[0].mlp.gate(hidden_TH, None)
    assert selected_TE.all() and torch.equal(gates_TE, logits_TE.softmax(dim=-1))
    torch.manual_seed(0)
    logits_TE, gates_TE, selected_TE, _ = layers[1].mlp.gate(hidden_TH, None)
    assert torch.equal(gates_TE, selected_TE.float()) and (selected_TE.sum(dim=-1) == 1).all()
    share_E, probs_E = selected_TE.float().mean(dim=0), logits_TE[0].softmax(dim=-1)
    expected = probs_E if inference == "hard" else torch.nn.functional.one_hot(probs_E.argmax(), 4).float()
    close(share_E, expected, atol=0.02)


@pytest.mark.parametrize(("router", "shape"), pairs(ROUTERS, SHAPES))
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, router: str, shape: str) -> None:
    model, ids = make_model(**ROUTERS[router], **SHAPES[shape]), tokens()
    model.save_pretrained(tmp_path / "a")
    config = read_config(tmp_path / "a")  # our own reader understands what transformers wrote
    assert config.family == SHAPES[shape].get("family", "llama")
    written = BtxMoeConfig(**btx_moe.BtxMoe().write(config, "float32", {})).to_dict()
    same = {**model.config.to_dict(), **{key: written.get(key) for key in ("auto_map", "architectures")}}
    assert {key: value for key, value in written.items() if same.get(key) != value} == {}
    again, info = BtxMoeForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    close(logits_of(again.eval(), ids), logits_of(model, ids))
    again.save_pretrained(tmp_path / "b")
    assert same_bits(load_folder(tmp_path / "a"), load_folder(tmp_path / "b"))
    assert read_config(tmp_path / "b") == config
    keys = set(load_folder(tmp_path / "a"))
    assert {f"model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down")} <= keys
    assert keys >= set(btx_moe.BtxMoe().stored(config))
    base = BtxMoeModel.from_pretrained(tmp_path / "a").eval()
    with torch.no_grad():
        close(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_dense_layers_between_and_a_shared_expert(tmp_path: Path) -> None:
    model, ids = make_model(**MORE), tokens()
    model.save_pretrained(tmp_path / "a")
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert kinds == ["BtxMoeMLP", "BtxMoeBlock", "BtxMoeBlock", "BtxMoeMLP"]
    assert model.model.layers[0].mlp.up_proj.weight.shape == (56, 32)
    moe = read_config(tmp_path / "a").moe
    assert (
        moe and moe.layers == [1, 2] and moe.dense_ffn_hidden_size == 56 and moe.shared_expert_intermediate_size == 24
    )
    assert len(model(ids, output_router_logits=True).router_logits) == 2
    assert torch.equal(logits_of(BtxMoeForCausalLM.from_pretrained(tmp_path / "a").eval(), ids), logits_of(model, ids))
    with torch.no_grad():
        model.model.layers[1].mlp.shared_expert.down_proj.weight.mul_(1.05)
    assert not torch.allclose(
        logits_of(BtxMoeForCausalLM.from_pretrained(tmp_path / "a").eval(), ids), logits_of(model, ids)
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.1.mlp.gate.weight", "is missing"),
        ("model.layers.0.mlp.experts.2.up_proj.weight", "is missing"),
        ("lm_head.weight", "is missing"),
        ("model.layers.0.self_attn.q_proj.weight", "is missing"),
        ("+model.layers.1.mlp.gate.penalty", "has no place in this model"),
    ],
)
def test_a_weight_that_is_missing_is_an_error(tmp_path: Path, name: str, said: str) -> None:
    """transformers would draw it at random and go on."""
    make_model().save_pretrained(tmp_path)
    tensors = load_folder(tmp_path)
    if name.startswith("+"):
        tensors[name[1:]] = torch.zeros(3)
    else:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    btx_nemo.register_auto_classes()
    for load in (BtxMoeForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=f"{name.lstrip('+')} {said}"):
            load(tmp_path)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("router", ["top_k", "switch", "divmoe", "nexus", "flexolmo-bias"])
def test_gradient_checkpointing_gives_the_same_gradients(router: str, reentrant: bool) -> None:
    changes, ids = {**ROUTERS[router], "router_aux_loss_coef": 0.3}, tokens()

    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        model = make_model(**changes).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(ids, labels=ids).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain, again = gradients(False), gradients(True)
    for name, value in plain.items():
        if value is None:
            assert name.endswith(("noise_weight", "domain_embeddings"))
        else:
            torch.testing.assert_close(
                again[name], value, atol=1e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert any(value.abs().max() > 1e-4 for name, value in plain.items() if ".gate." in name)


def test_the_balance_loss_is_ours_summed_over_layers_without_padding() -> None:
    model, ids = make_model(), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    found = model(ids, attention_mask=mask, labels=ids, output_router_logits=True)
    valid_T = mask.flatten().bool()
    expected = 0.0
    for logits_TE in found.router_logits:
        gates_TE, selected_TE = functional.top_k_gates(logits_TE[valid_T], 2)
        expected += switch(Decision(logits_TE[valid_T], gates_TE, selected_TE, 2))
    close(found.aux_loss, expected)
    model.config.router_aux_loss_coef = 0.5
    close(model(ids, attention_mask=mask, labels=ids).loss, found.loss + 0.5 * expected)
    assert model(ids, attention_mask=mask, labels=ids).router_logits is None
    outputs = model.model(ids, output_router_logits=True, output_hidden_states=True)
    assert [x.shape for x in outputs.selected_experts] == [(24, 4)] * 2 and len(outputs.hidden_states) == 3


def test_other_outputs() -> None:
    model, ids = make_model(attn_implementation="eager"), tokens()
    found = model(ids, output_attentions=True, output_hidden_states=True, logits_to_keep=3)
    assert found.logits.shape == (2, 3, 96) and torch.equal(found.logits, logits_of(model, ids)[:, -3:])
    assert [x.shape for x in found.attentions] == [(2, 4, 24, 24)] * 2
    close(found.attentions[0].sum(dim=-1), torch.ones(2, 4, 24))
    assert isinstance(model(ids, return_dict=False), tuple)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    close(embedded, logits_of(model, ids))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


@pytest.mark.parametrize("shape", SHAPES)
def test_eager_and_sdpa_attention_agree(shape: str) -> None:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    first, second = (make_model(attn_implementation=name, **SHAPES[shape]) for name in ("eager", "sdpa"))
    found = [logits_of(model, ids, attention_mask=mask)[mask.bool()] for model in (first, second)]
    close(*found)


@pytest.mark.parametrize("router", ["noisy_top_k", "nexus", "flexolmo-bias"])
def test_the_router_stays_fp32(tmp_path: Path, router: str) -> None:
    model, ids = make_model(**ROUTERS[router]), tokens()
    expected = {name: value.clone() for name, value in model.state_dict().items() if ".gate." in name}
    model.save_pretrained(tmp_path)
    loaded = BtxMoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for cast in (loaded, model.bfloat16()):
        state = cast.state_dict()
        assert all(
            torch.equal(state[name], value) and state[name].dtype == torch.float32 for name, value in expected.items()
        )
        assert state["model.layers.0.mlp.experts.0.gate_proj.weight"].dtype == torch.bfloat16
        assert logits_of(cast, ids).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert cast(ids, output_router_logits=True).router_logits[0].dtype == torch.float32


@pytest.mark.parametrize("router", ["divmoe", "nexus"])
def test_a_device_map_places_it(tmp_path: Path, router: str) -> None:
    """One layer comes from the disk when it is its turn."""
    pytest.importorskip("accelerate")
    model, ids = make_model(**ROUTERS[router]), tokens()
    model.save_pretrained(tmp_path / "hf")
    parts = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "lm_head"), "cpu")
    places = {**parts, "model.layers.1": "disk"}
    for device_map in ("auto", places):
        placed = BtxMoeForCausalLM.from_pretrained(
            tmp_path / "hf", device_map=device_map, offload_folder=tmp_path / "off"
        ).eval()
        close(logits_of(placed, ids).cpu(), logits_of(model, ids))
        words = placed.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=None
        )
        assert words.shape == (2, 29)


def test_nexus_s_embeddings_are_cached_and_forgotten() -> None:
    model, ids = make_model(**ROUTERS["nexus"]), tokens()
    router = model.model.layers[1].mlp.gate
    before = logits_of(model, ids)
    assert router._cached is not None and torch.equal(logits_of(model, ids), before)
    state = model.state_dict()
    state["model.layers.1.mlp.gate.w2"] = -state["model.layers.1.mlp.gate.w2"]
    model.load_state_dict(state)
    assert not torch.equal(logits_of(model, ids), before)
    model.train().eval()
    assert router._cached is None


def test_the_rules_are_those_of_training() -> None:
    """One text in two places: the model's files have to do without this package."""
    assert Path(routing_btx_moe.__file__).read_bytes() == Path(functional.__file__).read_bytes()
    assert set(configuration_btx_moe.ROUTERS) == set(btx_moe.ROUTERS) == set(router_names())
    files = btx_moe.BtxMoe().files()
    main = next(path.read_text() for path in files if path.name == "modeling_btx_moe.py")
    assert all(f"from .{path.stem} import" in main for path in files if path.name != "modeling_btx_moe.py")
    for path in files:
        imports = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert len(imports) > 2 and not any("btx_nemo" in line or "megatron" in line for line in imports)


def test_config_json_holds_all_of_a_model() -> None:
    """Every field of both dataclasses at another value than its default comes back."""
    moe = MoEConfig(
        num_experts=6, top_k=3, router="divmoe", options={"groups": 3}, shared_expert_intermediate_size=40,
        shared_expert_gate=True, experts=list("abcdef"), layers=[1, 3], dense_ffn_hidden_size=77,
    )  # fmt: skip
    model = ModelConfig(
        family="olmo3", num_layers=4, hidden_size=32, ffn_hidden_size=50, num_attention_heads=4, num_query_groups=2,
        head_dim=12, vocab_size=99, max_position_embeddings=333, norm_eps=2e-6, rope_theta=777.0,
        rope_scaling={"rope_type": "linear", "factor": 3.0}, tie_word_embeddings=True, init_std=0.3,
        attention_bias="all", qk_norm="full", post_norm=True, sliding_window=17,
        layer_types=["sliding_attention", "full_attention"] * 2, moe=moe,
    )  # fmt: skip
    for config in (model, moe):
        for field in type(config).__dataclass_fields__.values():
            if field.name not in ("num_experts", "num_layers", "moe"):
                assert getattr(config, field.name) != field.default, field.name
    architecture = btx_moe.BtxMoe()
    written = json.loads(json.dumps(architecture.write(model, "bfloat16", {"eos_token_id": 7, "pretraining_tp": 1})))
    assert written["eos_token_id"] == 7 and "pretraining_tp" not in written
    assert architecture.read(written, "config.json") == model
    assert BtxMoeConfig(**written).rope_scaling_full_attention_only
    known = {*inspect.signature(BtxMoeConfig.__init__).parameters, *inspect.signature(PretrainedConfig).parameters}
    tokens_and_code = {"bos_token_id", "eos_token_id", "pad_token_id", "model_type", "auto_map", "torch_dtype"}
    assert set(written) - known <= tokens_and_code  # nothing is written that nobody reads
    for damage in ({"num_experts": None}, {"router": 3}, {"head_dim": "x"}, {"moe_layers": [9]}, {"rope_theta": -1}):
        with pytest.raises(UserError, match=r"config\.json"):
            architecture.read({**written, **damage}, "config.json")
    with pytest.raises(UserError, match="quantized"):
        architecture.read({**written, "quantization_config": {}} | {"quantization_config": {"bits": 4}}, "config.json")


def test_a_config_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="router='mine': unknown; known: top_k, switch"):
        BtxMoeConfig(router="mine")
    with pytest.raises(ValueError, match="router='switch' sends a token to one expert, not num_experts_per_tok=2"):
        BtxMoeConfig(router="switch")


BARE = """
import sys, torch
sys.modules["btx_nemo"] = sys.modules["megatron"] = None  # as if they were not installed
from transformers import AutoModelForCausalLM
folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
ids = torch.arange(4, 24)[None]
with torch.no_grad():
    logits = model(ids).logits
words = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
model.save_pretrained(out)
again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(again(ids).logits, logits)
torch.save((logits, words), out + "/result.pt")
"""


def load_bare(python: str, folder: Path, out: Path, home: Path) -> tuple[Tensor, Tensor]:
    """What transformers makes of a folder in an interpreter that does not know this package."""
    import os

    keep = {key: value for key, value in os.environ.items() if key in ("PATH", "OMP_NUM_THREADS", "TMPDIR", "LANG")}
    env = {**keep, "HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [python, "-c", BARE, str(folder), str(out)]
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(out / "result.pt", weights_only=True)


def test_it_loads_where_btx_nemo_is_not(tmp_path: Path) -> None:
    """From the folder's own code, when the user trusts it; a copy saved there is whole again."""
    model = make_model(**ROUTERS["divmoe"])
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "home").mkdir()
    logits, words = load_bare(sys.executable, tmp_path / "hf", tmp_path / "out", tmp_path / "home")
    ids = torch.arange(4, 24)[None]
    close(logits, logits_of(model, ids))
    assert torch.equal(
        words, model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    )
    assert read_config(tmp_path / "out") == read_config(tmp_path / "hf")


def test_code_in_a_folder_is_never_executed(tmp_path: Path) -> None:
    from btx_nemo.convert.logits import hf_logits
    from btx_nemo.convert.verify import verify

    model = make_model(**ROUTERS["divmoe"])
    model.save_pretrained(tmp_path / "hf")
    for path in (tmp_path / "hf").glob("*.py"):
        path.write_text("raise SystemExit('executed')")
    close(hf_logits(tmp_path / "hf", tokens()), logits_of(model, tokens()))
    verify(tmp_path / "hf", tmp_path / "hf")
    assert type(AutoConfig.from_pretrained(tmp_path / "hf")).__module__.startswith("btx_nemo.")
    assert SIZES["vocab_size"] == read_config(tmp_path / "hf").vocab_size
