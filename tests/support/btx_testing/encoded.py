"""Models whose every weight says where it is from, and reading a result back by shared names."""

from __future__ import annotations

from pathlib import Path

import torch

from btx_nemo.families import names
from btx_nemo.families.source import open_source
from btx_nemo.plan.execute import evaluate
from btx_testing.models import make_llama
from btx_testing.tensors import load_folder

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
HIDDEN, WIDTH, LAYERS = 16, 24, 2


def coded(source: int, layer: int, part: str) -> torch.Tensor:
    """A feed-forward matrix whose elements are (source, layer, part, row, column) in mixed radix; exact in fp32."""
    rows, columns = (HIDDEN, WIDTH) if part == "down" else (WIDTH, HIDDEN)
    place = (source * LAYERS + layer) * 3 + names.PARTS.index(part)
    return (place * 32 + torch.arange(rows)[:, None]) * 32.0 + torch.arange(columns)


def decode(value: float) -> tuple[int, int, str, int, int]:
    """(source, layer, part, row, column)."""
    assert value == int(value), f"{value} is no code"
    rest, column = divmod(int(value), 32)
    rest, row = divmod(rest, 32)
    rest, part = divmod(rest, 3)
    return (*divmod(rest, LAYERS), names.PARTS[part], row, column)


def make_encoded(folder: Path, source: int) -> Path:
    """A Llama folder with coded feed-forward blocks; everything else is 1000 * tensor + source."""
    from safetensors.torch import save_file

    make_llama(folder, seed=0, **SIZES)
    tensors = load_folder(folder)
    for number, name in enumerate(sorted(tensors)):
        found = names.parse_ffn(name)
        plain = torch.full_like(tensors[name], 1000.0 * number + source)
        tensors[name] = coded(source, *found).contiguous() if found else plain
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_shared(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model on disk by their shared names."""
    source = open_source(folder)
    layout, readers = source.layout(), {source.name: source.reader}
    return {name: evaluate(source.table[name], readers, info, name, 0) for name, info in layout.items()}
