"""Bad input ends in one line that names the place, and leaves nothing behind; so does a kill."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.mixing import SMALL, add_tokenizer, make_models, mix_arguments
from btx_testing.models import make_llama
from btx_testing.tensors import load_folder, temporaries
from safetensors.torch import save_file

from btx_nemo.checkpoints import atomic
from btx_nemo.checkpoints.inspect import inspect_checkpoint
from btx_nemo.errors import UserError
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

Change = Callable[[Path, MixConfig], "MixConfig | None"]


def other(**changes: object) -> Change:
    def change(root: Path, config: MixConfig) -> None:
        import shutil

        shutil.rmtree(root / "math")
        make_llama(root / "math", seed=5, **{**SMALL, **changes})
        add_tokenizer(root / "math")

    return change


def missing(root: Path, config: MixConfig) -> MixConfig:
    return dataclasses.replace(config, experts={**config.experts, "math": str(root / "nowhere")})


def truncated(root: Path, config: MixConfig) -> None:
    path = root / "math" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 5)


def poison(value: float) -> Change:
    def change(root: Path, config: MixConfig) -> None:
        tensors = load_folder(root / "math")
        tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = value
        save_file(tensors, root / "math" / "model.safetensors")

    return change


def other_dtype(root: Path, config: MixConfig) -> None:
    make_llama(root / "math", seed=5, dtype=torch.bfloat16, **SMALL)


def lacking(root: Path, config: MixConfig) -> None:
    tensors = load_folder(root / "math")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, root / "math" / "model.safetensors")


def surplus(root: Path, config: MixConfig) -> None:
    tensors = load_folder(root / "math")
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(3)
    save_file(tensors, root / "math" / "model.safetensors")


def wrong_settings(root: Path, config: MixConfig) -> None:
    for name in ("seed", "math", "code"):
        path = root / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 40}))


def untied_head(root: Path, config: MixConfig) -> None:
    for name in ("seed", "math", "code"):
        path = root / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))


def other_tokenizer(root: Path, config: MixConfig) -> None:
    add_tokenizer(root / "math", w17=18, w18=17)


def edit_tokenizer(folder: Path, **sections: object) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **sections}))


def other_merges(root: Path, config: MixConfig) -> None:
    model = json.loads((root / "math/tokenizer.json").read_text())["model"]
    for name, merges in (("seed", ["w 1", "w 2"]), ("code", [["w", "1"], ["w", "2"]]), ("math", ["w 2", "w 1"])):
        edit_tokenizer(root / name, model={**model, "type": "BPE", "merges": merges})


def large_tokenizer(root: Path, config: MixConfig) -> None:
    for name in ("seed", "math", "code"):
        add_tokenizer(root / name, words=97)


def mixture(root: Path, config: MixConfig) -> MixConfig:
    run_mix(dataclasses.replace(config, out=str(root / "first")))
    return dataclasses.replace(config, experts={"math": str(root / "first")})


def settings(**changes: object) -> Change:
    return lambda root, config: dataclasses.replace(config, **changes)  # type: ignore[arg-type]


BAD: dict[str, tuple[Change, str]] = {
    "missing folder": (missing, "nowhere: no such folder"),
    "truncated": (truncated, "math/model.safetensors: tensor .*truncated"),
    "hidden size": (other(hidden_size=64), "math: hidden_size=64 .*has 32"),
    "layers": (other(num_hidden_layers=3), "math: num_hidden_layers=3 .*has 2"),
    "vocabulary": (other(vocab_size=128), "math: vocab_size=128 .*has 96"),
    "theta": (
        other(rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
        "math: rope_theta=5.0",
    ),
    "eps": (other(rms_norm_eps=0.01), "math: rms_norm_eps=0.01"),
    "tied": (other(tie_word_embeddings=True), "math: tie_word_embeddings=True"),
    "nan": (poison(math.nan), r"math/model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight' .*nan.*\[7, 3\]"),
    "inf": (poison(-math.inf), r"up_proj.weight' .*-inf.*\[7, 3\]"),
    "dtype of a source": (other_dtype, "math/model.safetensors: tensor .* is bfloat16 but the seed's is float32"),
    "tensor lacking": (lacking, "math.*no tensor 'model.layers.1.mlp.up_proj.weight'"),
    "tensor too many": (surplus, r"/math: tensor 'model.layers.1.self_attn.q_proj.bias' has no place"),
    "settings of another model": (wrong_settings, "seed/model.safetensors: tensor .*implies"),
    "tied with another head": (untied_head, "lm_head.weight' differs from the embedding"),
    "tokenizer": (other_tokenizer, "token 'w17' is id 18 but id 17"),
    "tokenizer beyond the rows": (large_tokenizer, "'w96' has id 96 but the embedding has 96 rows"),
    "a mixture": (mixture, "first: is a mixture already"),
    "top_k": (settings(top_k=4), "top_k=4 exceeds the 3 experts"),
    "top_k 0": (settings(top_k=0), "top_k=0"),
    "no experts": (settings(experts={}), "experts: none given"),
    "name": (settings(experts={"Law": "x"}), "experts.Law: only a-z, 0-9, _ and - are allowed, a letter first"),
    "reserved name": (settings(experts={"seed": "x"}), "experts.seed: has another meaning"),
    "empty seed": (settings(seed=""), r"mix: seed: is empty; give seed=DIR"),
    "empty expert": (settings(experts={"math": ""}), r"mix: experts\.math: is empty; give experts\.math=DIR"),
    "empty out": (settings(out=""), r"mix: out: is empty; give out=DIR"),
    "recipe": (settings(recipe="stew"), r"--config-name stew: not in .*; known: add, .*btx"),
    "dtype": (settings(dtype="fp7"), "dtype=fp7: unknown; known: float32"),
    "std": (settings(router_init_std=math.nan), "router_init_std"),
    "absurd std": (settings(router_init_std=1e4), r"router_init_std=10000\.0 must be .* at most 1000"),
    "negative seed": (settings(rng_seed=-1), "rng_seed=-1 must be"),
    "huge seed": (settings(rng_seed=2**63), "rng_seed=9223372036854775808 must be"),
    "merges": (other_merges, r"math/tokenizer.json: model\.merges differs from the seed's"),
    "workers": (settings(workers=0), "workers=0"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, commands: CommandServer, kind: str) -> None:
    change, message = BAD[kind]
    config = make_models(tmp_path, "math", "code")
    config = change(tmp_path, config) or config
    before = sorted(path.name for path in tmp_path.iterdir())
    ended = commands.run(*mix_arguments(config))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("btx-nemo mix: ") and ended.err.endswith("\n") and ended.err.count("\n") == 1
    assert re.search(message, ended.err), ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_output_that_exists_is_refused_first(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math")
    (tmp_path / "mix").mkdir()
    with pytest.raises(UserError, match="mix: already exists"):
        run_mix(config)
    assert list((tmp_path / "mix").iterdir()) == []


def test_no_disk_space_is_known_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_models(tmp_path, "math")
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 10_000)
    with pytest.raises(UserError, match=r"the result needs up to .*metadata included"):
        run_mix(config)
    assert not (tmp_path / "mix").exists() and temporaries(tmp_path) == []


def test_another_normalizer_is_warned_about_and_formatting_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_models(tmp_path, "math", "code")
    edit_tokenizer(tmp_path / "math", normalizer={"type": "Lowercase"})
    path = tmp_path / "code/tokenizer.json"
    table = {**json.loads(path.read_text()), "normalizer": None, "truncation": {"max_length": 4}}
    path.write_text(json.dumps(dict(reversed(table.items())), indent=7))
    run_mix(config)
    found = [record.message for record in caplog.records if "tokenizer.json" in record.message]
    assert found == [
        f"{tmp_path}/math/tokenizer.json: normalizer differs from the seed's {tmp_path}/seed; "
        "the mixture takes the seed's"
    ]


def test_the_margin_is_small_for_a_small_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_models(tmp_path, "math")
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 3 << 20)
    run_mix(config)
    taken = sum(path.stat().st_size for path in (tmp_path / "mix").rglob("*"))
    assert taken < 3 << 20


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_a_side_file_that_is_no_file_is_found_before_a_tensor_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    config = make_models(tmp_path, "math")
    make(tmp_path / "seed" / "chat_template.jinja")
    monkeypatch.setattr("btx_nemo.mix.run.stream", lambda *_, **__: pytest.fail("tensors are written"))
    with pytest.raises(UserError, match=r"seed/chat_template.jinja: "):
        run_mix(config)
    assert not (tmp_path / "mix").exists() and temporaries(tmp_path) == []


def test_a_copy_of_the_seed_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_models(tmp_path, "math", "code")
    run_mix(dataclasses.replace(config, experts={**config.experts, "code": config.seed}))
    assert [record.message for record in caplog.records if "bit-equal" in record.message] == [
        f"{tmp_path}/seed: expert code looks bit-equal to the seed; was it trained?"
    ]


SLOWED = """
import os, sys, time
from btx_nemo.checkpoints import safetensors_sink
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix
write = safetensors_sink.SafetensorsSink.write
def slow(self, *arguments):
    os.write(1, b"writing\\n")
    time.sleep(0.05)
    write(self, *arguments)
safetensors_sink.SafetensorsSink.write = slow
root = sys.argv[1]
run_mix(MixConfig(seed=root + "/seed", experts={"math": root + "/math"}, out=root + "/mix"))
"""


def test_a_mix_killed_half_way_leaves_nothing_that_inspect_accepts(tmp_path: Path) -> None:
    config = make_models(tmp_path, "math")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen(
        [sys.executable, "-c", SLOWED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    for _ in range(8):
        assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(0.05)
    assert not (tmp_path / "mix").exists()
    (left,) = temporaries(tmp_path)
    with pytest.raises(UserError, match="unfinished"):
        inspect_checkpoint(tmp_path / left)
    os.rename(tmp_path / left, tmp_path / "taken")
    with pytest.raises(UserError):
        inspect_checkpoint(tmp_path / "taken")
    os.rename(tmp_path / "taken", tmp_path / left)
    run_mix(config)
    assert temporaries(tmp_path) == [] and inspect_checkpoint(tmp_path / "mix")["moe"]["num_experts"] == 2
