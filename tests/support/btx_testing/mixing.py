"""Small specialists with tokenizers, for tests of mixing and converting."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from btx_nemo.mix.config import MixConfig
from btx_testing.models import make_llama

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def add_tokenizer(folder: Path, words: int = 90, **changes: int) -> None:
    """A word-level tokenizer.json with its settings; `changes` replaces ids of words."""
    vocab = {f"w{i}": i for i in range(words)} | changes
    table = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}}
    (folder / "tokenizer.json").write_text(json.dumps(table))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def mix_arguments(config: MixConfig) -> list[str]:
    """The command line that asks for this mix."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    experts = {f"experts.{name}": path for name, path in values.pop("experts").items()}
    options = values.pop("options")
    spelled = {key: "null" if value is None else value for key, value in (values | options | experts).items()}
    return ["mix", "--config-name", config.recipe, *(f"{key}={value}" for key, value in spelled.items())]


def forbid_reading(_: str) -> None:
    """Makes the reading of any tensor fail; to be called in the command's process before it begins."""
    from btx_nemo.checkpoints.safetensors import SafetensorsReader
    from btx_nemo.checkpoints.torch_dist import DistReader

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor is read")

    for reader in (SafetensorsReader, DistReader):
        reader.read_into = refuse  # type: ignore[method-assign]


def make_models(root: Path, *names: str, dtype: torch.dtype = torch.float32, **changes: Any) -> MixConfig:
    """A seed and specialists below `root`, all different, and the settings that mix them into `root`/mix."""
    for number, name in enumerate(("seed", *names)):
        make_llama(root / name, seed=number, dtype=dtype, **{**SMALL, **changes})
        add_tokenizer(root / name)
    return MixConfig(
        seed=str(root / "seed"),
        experts={name: str(root / name) for name in names},
        out=str(root / "mix"),
        top_k=min(2, len(names) + 1),
        workers=2,
    )


def slow_writes(seconds: str) -> None:
    """Makes every write of a tensor's part take longer; to be called in the command's process before it begins."""
    import time

    from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
    from btx_nemo.checkpoints.torch_dist_sink import DistSink

    def slowed(write: Any) -> Any:
        def run(*arguments: Any) -> None:
            time.sleep(float(seconds))
            write(*arguments)

        return run

    for sink in (SafetensorsSink, DistSink):
        sink.write = slowed(sink.write)  # type: ignore[method-assign]
