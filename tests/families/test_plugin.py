"""A family and an architecture from another installed package, by entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from btx_testing.models import make_llama

MODULE = """
from btx_nemo.families.architecture import register_architecture
from btx_nemo.families.base import Family, register_family
from btx_nemo.families.decoder import DecoderArchitecture, Defaults
from btx_nemo.families.table import PRE_NORM


def register():
    register_family(Family("mine", PRE_NORM))
    register_architecture(
        DecoderArchitecture(
            model_type="my_llama",
            family="mine",
            class_name="MyLlamaForCausalLM",
            defaults=Defaults(max_position_embeddings=64),
            on_disk=lambda name: name.replace("model.", "transformer."),
        )
    )
"""
ROUND_TRIP = """
import sys
from pathlib import Path
from btx_testing.tensors import load_folder, same_bits
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.families.source import open_source

src, out = map(Path, sys.argv[1:])
assert open_source(src).config.family == "mine"
import_hf(src, out / "ckpt")
print(export_hf(out / "ckpt", out / "back"))
assert same_bits(load_folder(src), load_folder(out / "back"))
"""


def install(site: Path, module: str, value: str) -> None:
    """What pip would leave of a package with one entry point."""
    (site / "my_families.py").write_text(module)
    info = site / "my_families-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-families\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[btx_nemo.families]\nmine = {value}\n")


def run(site: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = f"import sys; sys.path[:0] = [{str(site)!r}, *{sys.path!r}]\n" + program
    return subprocess.run(
        [sys.executable, "-c", command, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_it_is_read_and_written_like_our_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    src = make_llama(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    renamed = {name.replace("model.", "transformer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, src / "model.safetensors", metadata={"format": "pt"})
    settings = (src / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "my_llama"')
    (src / "config.json").write_text(settings)
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", MODULE, "my_families:register")
    ended = run(tmp_path / "site", ROUND_TRIP, src, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "my_llama, which computes what the model does" in ended.stdout


@pytest.mark.parametrize("module", ["raise RuntimeError('no such thing')", "def register(:"])
def test_one_that_fails_is_named(tmp_path: Path, module: str) -> None:
    install(tmp_path, module, "my_families:register")
    ended = run(tmp_path, "from btx_nemo.cli import main; main(['inspect', sys.argv[1]])", make_llama(tmp_path / "hf"))
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "entry point mine = my_families:register of group btx_nemo.families:" in ended.stderr
