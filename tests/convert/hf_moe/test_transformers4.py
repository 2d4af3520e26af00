"""The same files in transformers 4.57, in an environment made for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from btx_testing.commands import clean_environment
from btx_testing.hf_moe import FAMILIES, ROUTERS, make_model, tokens
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.convert.logits import hf_logits
from btx_nemo.families.architecture import read_config
from btx_nemo.families.btx_moe import BtxMoe

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SCRIPT = """
import sys, torch, transformers
from pathlib import Path
sys.modules["btx_nemo"] = None  # as if it were not installed
assert transformers.__version__.startswith("4.57."), transformers.__version__
from transformers import AutoModelForCausalLM
root, ids, results = Path(sys.argv[1]), torch.load(sys.argv[1] + "/ids.pt"), {}
for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        logits = model(ids).logits
    words = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    narrow = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16).state_dict()
    wide = [name for name, value in narrow.items() if value.dtype == torch.float32]
    assert wide and all(".mlp.gate." in name for name in wide), wide
    assert set(wide) == {name for name in narrow if ".mlp.gate." in name}
    model.save_pretrained(root.with_name("saved") / folder.name)
    results[folder.name] = (logits, words)
torch.save(results, root.with_name("results.pt"))
"""


def test_there_and_back_through_4_57(transformers4: str, tmp_path: Path) -> None:
    """Written by 5, loaded by 4.57 from the folder's own code, saved there, read here: the same all along."""
    root, ids, models = tmp_path / "written", tokens(), {}
    for router, family in [*((name, "llama") for name in ROUTERS), *(("divmoe", name) for name in FAMILIES)]:
        model = models[f"{router}-{family}"] = make_model(**{**FAMILIES[family], **ROUTERS[router]})
        model.save_pretrained(root / f"{router}-{family}")
    torch.save(ids, root / "ids.pt")
    env = {**clean_environment(), "HF_HOME": str(tmp_path / "home")}
    command = [transformers4, "-c", SCRIPT, str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    assert set(results) == set(models) and len(models) >= 18
    for name, model in models.items():
        logits, words = results[name]
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, logits, atol=2e-5, rtol=0)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert torch.equal(found, words), name
        saved = tmp_path / "saved" / name
        assert same_bits(load_folder(root / name), load_folder(saved))
        assert read_config(saved) == read_config(root / name)
        assert {path.name for path in saved.glob("*.py")} == {path.name for path in BtxMoe().files()}
        torch.testing.assert_close(hf_logits(saved, ids), logits, atol=2e-5, rtol=0)


def test_all_that_is_true_of_the_model_is_true_in_4_57(transformers4: str) -> None:
    code = "import sys, pytest, transformers as t; assert t.__version__.startswith('4.57.'); sys.exit(pytest.main())"
    command = [transformers4, "-c", code, "-q", "-p", "no:cacheprovider", str(HERE / "test_model.py")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
