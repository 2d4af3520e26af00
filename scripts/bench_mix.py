"""Speed and memory of a mix, against `cp` of the bytes it writes, on this machine and file system.

    python scripts/bench_mix.py [--size small|medium|large] [--experts 3] [--workers N] [--folder DIR]

Makes Llama-shaped models, mixes them in a process of its own, and copies the result with `cp`. `cp + sync` is `cp`
followed by an fsync of every file, which is what a mix does before its output appears.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SIZES = {
    "small": dict(hidden_size=512, num_layers=8, ffn_hidden_size=1408, num_attention_heads=8, vocab_size=8000),
    "medium": dict(hidden_size=1024, num_layers=20, ffn_hidden_size=2816, num_attention_heads=16, vocab_size=32000),
    "large": dict(hidden_size=2048, num_layers=22, ffn_hidden_size=5632, num_attention_heads=32, vocab_size=32000),
}
"""77M, 301M and 1.1B parameters a model."""

CHILD = """
import json, resource, sys, time
import btx_nemo.mix.run as run
from btx_nemo.mix.config import MixConfig

def kilobytes(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

before = kilobytes("VmRSS")
begun, cpu = time.perf_counter(), time.process_time()
run.run_mix(MixConfig(**json.loads(sys.argv[1])))
facts = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
print(json.dumps({**facts, "over": (kilobytes("VmHWM") - before) * 1024, "interpreter": before * 1024}))
"""


def make_model(folder: Path, size: str, dtype: str, seed: int) -> int:
    """Write a random Llama folder; returns the bytes of its largest tensor."""
    from btx_nemo.checkpoints.files import write_json
    from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
    from btx_nemo.families.architecture import choose_architecture
    from btx_nemo.families.base import layout as shapes
    from btx_nemo.families.config import ModelConfig
    from btx_nemo.plan.execute import execute
    from btx_nemo.plan.expr import Normal
    from btx_nemo.plan.plan import Job, Plan

    shape = SIZES[size]
    config = ModelConfig(
        **shape,
        num_query_groups=shape["num_attention_heads"] // 2,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
    )
    layout = shapes(config, dtype)
    folder.mkdir(parents=True)
    sink = SafetensorsSink(folder, layout, producer=None)  # as other tools write: without a manifest
    execute(Plan(tuple(Job(name, info, Normal(0.02)) for name, info in layout.items()), {}), {}, sink, seed=seed)
    sink.close()
    write_json(folder / "config.json", choose_architecture(config, {}, "bench").write(config, dtype, {}))
    return max(info.nbytes for info in layout.values())


def copy(source: Path, target: Path, sync: bool) -> float:
    """Seconds that `cp -r` takes, with an fsync of every file when `sync`."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    if sync:
        from btx_nemo.checkpoints.atomic import fsync_tree

        fsync_tree(target)
    seconds = time.perf_counter() - begun
    shutil.rmtree(target)
    os.sync()
    return seconds


def mix(root: Path, out: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Mix in a process of its own: seconds, CPU seconds, bytes of memory over the interpreter after its imports."""
    experts = {f"e{i}": str(root / f"e{i}") for i in range(arguments.experts)}
    config = {"seed": str(root / "seed"), "experts": experts, "out": str(out), "workers": arguments.workers}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    os.sync()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(config)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(child.stdout.splitlines()[-1])


def measure(root: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One round: a mix, and both kinds of copy of an earlier result, each after the one before is gone."""
    facts = mix(root, root / "mix", arguments)
    shutil.rmtree(root / "mix")
    os.sync()
    facts["cp"] = copy(root / "reference", root / "copy", sync=False)
    facts["cp_sync"] = copy(root / "reference", root / "copy", sync=True)
    facts["bytes"] = sum(path.stat().st_size for path in (root / "reference").iterdir())
    return facts


def main() -> None:
    """Make the models, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--experts", type=int, default=3, help="specialists beside the seed")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work; removed afterwards")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="bench-mix-", dir=arguments.folder))
    try:
        for number, name in enumerate(["seed", *(f"e{i}" for i in range(arguments.experts))]):
            largest = make_model(root / name, arguments.size, arguments.dtype, number)
        print(f"{'round':>5} {'mix s':>7} {'cpu s':>7} {'cp s':>7} {'cp+sync s':>9} {'GB/s':>6} "
              f"{'vs cp':>6} {'vs cp+sync':>10} {'peak MB':>8}")  # fmt: skip
        mix(root, root / "reference", arguments)
        measure(root, arguments)  # not counted: fills the page cache
        ratios = []
        for number in range(arguments.rounds):
            facts = measure(root, arguments)
            ratios.append(facts["cp"] / facts["seconds"])
            print(
                f"{number:>5} {facts['seconds']:>7.2f} {facts['cpu']:>7.2f} {facts['cp']:>7.2f} "
                f"{facts['cp_sync']:>9.2f} "
                f"{facts['bytes'] / facts['seconds'] / 1e9:>6.2f} {facts['cp'] / facts['seconds']:>6.2f} "
                f"{facts['cp_sync'] / facts['seconds']:>10.2f} {facts['over'] / 1e6:>8.0f}",
                flush=True,
            )
        print(
            f"{facts['bytes'] / 1e9:.2f} GB written; median ratio to cp {statistics.median(ratios):.2f}; "
            f"aims: ratio >= 0.8, "
            f"peak <= {largest / 1e6:.0f} MB (largest tensor) + 300 MB; interpreter {facts['interpreter'] / 1e6:.0f} MB"
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
