"""What the documents promise: their links lead somewhere, and the layouts they show are possible."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from btx_nemo.config.schema import LayoutConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.megatron.parallel import check_layout

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = [
    *PAGES,
    *sorted((ROOT / "slurm").glob("*.sh")),
    ROOT / "btx_nemo" / "launch" / "submit.py",
    ROOT / "btx_nemo/cli.py",
]
LINES = [
    pytest.param(line, id=f"{path.name}:{number}")
    for path in SHOWN
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if re.search(r"layout\.(tp|pp|vpp|cp|ep|etp)=\d", line)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for target in targets:
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


def check_shown(line: str, ranks: int = 8) -> None:
    """`check_layout` of the layout in a line, for Llama-3.2-1B, with as many experts as the line names, else four."""
    layout = {name: int(size) for name, size in re.findall(r"layout\.(tp|pp|vpp|cp|ep|etp)=(\d+)", line)}
    started = re.search(r"--nproc-per-node[ =](\d+)", line)
    named = re.search(r"(?:submit|mix\.sh) ((?:[a-z][a-z0-9_]* )+)", line)
    moe = MoEConfig(num_experts=len(named[1].split()) + 1 if named else 4) if "ep" in layout else None
    sizes = dict(num_layers=16, hidden_size=2048, ffn_hidden_size=8192, head_dim=64, vocab_size=128256)
    model = ModelConfig(**sizes, num_attention_heads=32, num_query_groups=8, moe=moe)  # type: ignore[arg-type]
    check_layout(LayoutConfig(**layout), int(started[1]) if started else ranks, model)


@pytest.mark.parametrize("line", LINES)
def test_every_layout_shown_is_accepted(line: str) -> None:
    check_shown(line)


def test_the_check_sees_a_layout_that_is_not_possible() -> None:
    assert len(LINES) >= 6
    for line in ("slurm/mix.sh math code -- layout.ep=3", "slurm/mix.sh math code -- layout.ep=2", "layout.tp=3"):
        with pytest.raises(UserError, match="does not divide"):
            check_shown(line)
