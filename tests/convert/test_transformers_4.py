"""What we export loads in transformers 4.57 as it does in 5, and what 4.57 writes we read: nothing lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from btx_testing import transformers_4
from btx_testing.mixes import Mixes
from btx_testing.models import FAMILIES, MIXTURES, hf_logits, make_model, probe_tokens
from btx_testing.tensors import load_folder

from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.families.architecture import read_config
from btx_nemo.families.source import open_source

pytestmark = pytest.mark.slow
SIMPLER = {"nexus": ("llama", "qwen2_moe"), "flexolmo": ("olmo2", "flex_olmo")}
"""Recipes whose mixtures leave as a simpler model: of which family, as which architecture."""
NAMES = [*FAMILIES, *MIXTURES, *SIMPLER]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exported")
    folders, mixes = {}, Mixes(root / "mixes")
    for number, name in enumerate(NAMES):
        if name in SIMPLER:
            family, architecture = SIMPLER[name]
            import_hf(mixes.mix(family, name), root / "ckpt" / name)
            assert export_hf(root / "ckpt" / name, root / name, verify="true").startswith(f"{architecture}, which")
            folders[name] = root / name
            continue
        make_model(root / "src" / name, name, seed=number)
        import_hf(root / "src" / name, root / "ckpt" / name)
        export_hf(root / "ckpt" / name, root / name)
        folders[name] = root / name
    return folders


@pytest.fixture(scope="module")
def report(transformers4: str, exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.pt"
    torch.save(probe_tokens(), tokens)
    ran = subprocess.run(
        [transformers4, transformers_4.__file__, str(tokens), *map(str, exported.values())],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_an_export_has_equal_logits_in_both(report: dict, exported: dict[str, Path], name: str) -> None:
    assert report["version"].startswith("4.57.")
    folder = exported[name]
    assert report[str(folder)] == {}
    theirs = torch.load(folder / "logits.pt")
    torch.testing.assert_close(theirs, hf_logits(folder, probe_tokens()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_4_writes_is_read_as_the_same_model(
    report: dict, exported: dict[str, Path], name: str
) -> None:
    ours, theirs = exported[name], exported[name] / "rewritten"
    assert read_config(theirs) == read_config(ours)
    source = open_source(theirs)
    assert source.layout().keys() == open_source(ours).layout().keys()
    original, rewritten = load_folder(ours), load_folder(theirs)
    for key, tensor in rewritten.items():
        assert torch.equal(tensor, original[key]), key
