"""Training runs small enough for a test: two domains, models of two layers, and what a run directory holds."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from btx_testing.text import byte_tokenizer, sentence

VOCAB = 288
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    max_position_embeddings=64,
)
SPEED = ("tokens_per_second", "flops_per_second", "flops_utilization", "memory_bytes")
"""Keys of metrics.jsonl that no two runs share."""


@dataclass(frozen=True)
class TinyWorld:
    """Data and models that all runs of a test session start from; read only."""

    data: Path
    dense: Path
    mixture: Path

    def arguments(self, config: str, out: Path, **overrides: Any) -> list[str]:
        """Command line of a training run; a dot in an override's name is written as `__`."""
        dense = config.endswith("expert")
        values = {
            "init_from": self.dense if dense else self.mixture,
            "data__path": self.data,
            "data__seq_length": 32,
            "steps": 12,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "eval_batches": 1,
            "log_every": 1,
            "checkpoint__every": 4,
            "optim__warmup_steps": 2,
            **({"domain": "math"} if dense else {}),
            "out": out,
            **overrides,
        }
        return ["train", "--config-name", config, *(f"{k.replace('__', '.')}={v}" for k, v in values.items())]


def make_world(root: Path) -> TinyWorld:
    """Two domains of random text with a byte-level tokenizer, a dense Llama and a Mixtral of four experts."""
    from btx_nemo.data.prepare import prepare_data
    from btx_testing.models import make_llama, make_mixtral  # imports torch

    for number, domain in enumerate(("math", "code")):
        rng, folder = Random(number), root / "text" / domain
        folder.mkdir(parents=True)
        for file in range(6):
            (folder / f"{file}.txt").write_text("".join(sentence(rng) for _ in range(12)))
        prepare_data([folder], byte_tokenizer(root / "tokenizer"), root / "data", domain, workers=1)
    return TinyWorld(
        data=root / "data",
        dense=make_llama(root / "dense", seed=1, **SIZES),
        mixture=make_mixtral(root / "mixture", seed=1, **SIZES),
    )


def copy_domain(source: Path, target: Path, **changes: str) -> None:
    """A domain's folder as the domain of another name, and with these changes in its meta.json."""
    shutil.copytree(source, target)
    meta = json.loads((target / "meta.json").read_text())
    (target / "meta.json").write_text(json.dumps({**meta, "domain": target.name, **changes}))


def weights(out: Path) -> bytes:
    """The exported weights of a finished run, byte for byte."""
    assert (out / "DONE").exists()
    (file,) = (out / "hf").glob("*.safetensors")
    return file.read_bytes()


def metrics(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what differs from run to run."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in SPEED} for record in records]


def curve(out: Path) -> list[float]:
    """All losses and validation losses in metrics.jsonl."""
    return [value for r in metrics(out) for value in (r.get("loss"), *r.get("valid", {}).values()) if value is not None]


def logged_step(out: Path) -> int:
    """The last step in metrics.jsonl, which may be in the midst of being written; -1 where there is none."""
    if not (out / "metrics.jsonl").exists():
        return -1
    lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else -1


def saved_step(out: Path) -> int:
    """The step of the checkpoint that `latest` names, which must be complete and readable; 0 where there is none."""
    from btx_nemo.families.source import open_source

    if not (out / "latest").exists():
        return 0
    source = open_source(out)  # checks the manifest, and every size, name and shape
    return int(source.folder.name.removeprefix("step_"))
