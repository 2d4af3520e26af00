"""Speed and memory of a mix, against `cp` of the bytes it writes and against mergekit, on this machine.

    python scripts/bench_mix.py [--size small|medium|large] [--recipe btx|average] [--cold] [--mergekit ENV/bin]
    python scripts/bench_mix.py --memory [--size medium]

Makes Llama-shaped models that share a seed, then, taking turns: `btx-nemo mix` in a process of its own, `cp -r` of what
it wrote (`cp + sync`: with an fsync of every file, which a mix ends with too), and mergekit doing the same. Outputs
are removed, and the disk is synced, after each. Sources, and what `cp` reads, are in the page cache before each
(`--cold`: in none).

mergekit (0.1.5) does btx as two commands: mergekit-yaml (linear, over all members), then mergekit-moe
(gate_mode: random) with that as base. Install it in an environment of its own and give its `bin` folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIZES = {
    "small": dict(hidden_size=512, num_layers=8, ffn_hidden_size=1408, num_attention_heads=8, vocab_size=8000),
    "medium": dict(hidden_size=1024, num_layers=20, ffn_hidden_size=2816, num_attention_heads=16, vocab_size=32000),
    "large": dict(hidden_size=2048, num_layers=22, ffn_hidden_size=5632, num_attention_heads=32, vocab_size=32000),
}
"""34M, 301M and 1.17B parameters a model."""
CHILD = """
import gc, sys, time
import btx_nemo.cli, btx_nemo.mix.run, btx_nemo.config.load, btx_nemo.config.build, btx_nemo.mix.config
begun = time.perf_counter()
try:
    btx_nemo.cli.main(sys.argv[1:])
finally:
    print("seconds", time.perf_counter() - begun)
"""
"""The command with a clock that starts after the imports."""


def make_model(folder: Path, size: dict[str, int], dtype: str, seed: int) -> None:
    """Write a random Llama folder with a word-level tokenizer."""
    from btx_nemo.checkpoints.files import write_json
    from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
    from btx_nemo.families.base import layout as shapes
    from btx_nemo.families.config import ModelConfig
    from btx_nemo.families.target import choose_target
    from btx_nemo.plan.execute import execute
    from btx_nemo.plan.expr import Normal
    from btx_nemo.plan.plan import Job, Plan

    heads = size["num_attention_heads"]
    config = ModelConfig(**size, num_query_groups=heads // 2, head_dim=size["hidden_size"] // heads)
    layout = shapes(config, dtype)
    folder.mkdir(parents=True)
    sink = SafetensorsSink(folder, layout, producer=None)  # as other tools write: without a manifest
    execute(Plan(tuple(Job(name, info, Normal(0.02)) for name, info in layout.items()), {}), {}, sink, seed=seed)
    sink.close()
    write_json(folder / "config.json", choose_target(config, {}, "bench").architecture.write(config, dtype, {}))
    vocab = {f"w{i}": i for i in range(size["vocab_size"])}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    write_json(folder / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2"}
    write_json(folder / "tokenizer_config.json", settings)


def make_models(root: Path, count: int, size: dict[str, int], dtype: str) -> list[Path]:
    """The specialists, then the seed; in other processes, since a child's peak memory begins at its parent's."""
    folders = [root / name for name in (*(f"e{i}" for i in range(count)), "seed")]
    for number, folder in enumerate(folders):
        process = multiprocessing.get_context("spawn").Process(target=make_model, args=(folder, size, dtype, number))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit("a model could not be made")
    return folders


def run(*command: str) -> dict[str, Any]:
    """Seconds, CPU seconds and peak bytes of a command; its output is shown when it fails."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        facts = {
            "wall": time.perf_counter() - begun,
            "cpu": usage.ru_utime + usage.ru_stime,
            "peak": usage.ru_maxrss * 1024,
        }
        output.seek(0)
        text = output.read()
    if child.returncode:
        sys.exit(f"{' '.join(command)[:300]}\n{text[-3000:]}")
    return {**facts, "text": text}


def mix(folders: list[Path], out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Our command."""
    *experts, seed = folders
    settings = [f"experts.{folder.name}={folder}" for folder in experts]
    if arguments.workers:
        settings.append(f"workers={arguments.workers}")
    facts = run(
        *(sys.executable, "-c", CHILD, "mix", "--config-name", arguments.recipe, f"seed={seed}", f"out={out}"),
        *settings,
    )
    return {**facts, "mix": float(facts["text"].rsplit("seconds", 1)[1])}


def mergekit(folders: list[Path], out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same by mergekit: a linear merge, then for btx mergekit-moe on top of it."""
    merged = out if arguments.recipe == "average" else out / "linear"
    out.parent.mkdir(exist_ok=True)
    settings = out.with_suffix(".yml")
    models = [{"model": str(folder), "parameters": {"weight": 1.0}} for folder in folders]
    settings.write_text(json.dumps({"merge_method": "linear", "models": models, "dtype": arguments.dtype}))
    steps = [run(f"{arguments.mergekit}/mergekit-yaml", str(settings), str(merged), "--quiet")]
    if merged is not out:
        experts = [{"source_model": str(folder), "positive_prompts": [""]} for folder in folders]
        table = {"base_model": str(merged), "gate_mode": "random", "dtype": arguments.dtype, "experts": experts}
        settings.write_text(json.dumps(table))
        steps.append(run(f"{arguments.mergekit}/mergekit-moe", str(settings), str(out / "moe"), "--quiet"))
    return {
        "wall": sum(step["wall"] for step in steps),
        "cpu": sum(step["cpu"] for step in steps),
        "peak": max(step["peak"] for step in steps),
    }


def copy(source: Path, target: Path, sync: bool) -> float:
    """Seconds that `cp -r` takes, with an fsync of every file when `sync`."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.iterdir() if sync else ():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - begun


def settle(out: Path, reads: list[Path], cold: bool) -> None:
    """Remove an output, sync, and bring what is read next into the page cache, or out of it."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    buffer = bytearray(16 << 20)
    for path in (file for folder in reads for file in folder.iterdir()):
        with open(path, "rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not cold and stream.readinto(buffer):
                pass


def compare(root: Path, arguments: argparse.Namespace) -> None:
    """The rounds, and a table of them with medians."""
    folders = make_models(root, arguments.experts, SIZES[arguments.size], arguments.dtype)
    out, reference = root / "out", root / "reference"
    mix(folders, reference, arguments)
    written = sum(path.stat().st_size for path in reference.iterdir())
    read = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    print(f"{arguments.recipe}: {len(folders)} models, {read / 1e9:.2f} GB read, {written / 1e9:.2f} GB written, "
          f"{'nothing' if arguments.cold else 'what is read is'} in the page cache, {os.cpu_count()} CPUs")  # fmt: skip
    titles = ("mix s", "command s", "CPU s", "peak MB", "cp s", "cp+sync s", "cp/mix", "cp+sync/mix")
    theirs = ("mergekit s", "CPU s", "peak MB", "CPU ratio", "peak ratio") if arguments.mergekit else ()
    print(" | ".join(("round", *titles, *theirs)))
    rows = []
    for number in range(arguments.rounds):
        settle(out, folders, arguments.cold)
        ours = mix(folders, out, arguments)
        settle(out, [reference], arguments.cold)
        plain = copy(reference, out, sync=False)
        settle(out, [reference], arguments.cold)
        synced = copy(reference, out, sync=True)
        row = [ours["mix"], ours["wall"], ours["cpu"], ours["peak"] / 1e6, plain, synced]
        row += [plain / ours["mix"], synced / ours["mix"]]
        if arguments.mergekit:
            settle(out, folders, arguments.cold)
            other = mergekit(folders, out, arguments)
            row += [other["wall"], other["cpu"], other["peak"] / 1e6]
            row += [ours["cpu"] / other["cpu"], ours["peak"] / other["peak"]]
        settle(out, [], arguments.cold)
        rows.append(row)
        print(" | ".join((str(number + 1), *(f"{value:.2f}" for value in row))), flush=True)
    print(" | ".join(("median", *(f"{statistics.median(column):.2f}" for column in zip(*rows)))))
    if not arguments.mergekit:
        print(
            "mergekit: not measured; pip install mergekit==0.1.5 in an environment of its own, give --mergekit ENV/bin"
        )


def memory(root: Path, arguments: argparse.Namespace) -> None:
    """Peak memory as layers and experts double."""
    size = SIZES[arguments.size]
    print("layers | experts | GB read | peak MB")
    for layers, experts in ((size["num_layers"] // 2, 3), (size["num_layers"], 3), (size["num_layers"] // 2, 7)):
        folder = root / f"{layers}-{experts}"
        folders = make_models(folder, experts, {**size, "num_layers": layers}, arguments.dtype)
        read = sum(path.stat().st_size for source in folders for path in source.iterdir())
        peaks = []
        for _ in range(arguments.rounds):
            peaks.append(mix(folders, folder / "out", arguments)["peak"])
            shutil.rmtree(folder / "out")
        print(f"{layers} | {experts + 1} | {read / 1e9:.2f} | {statistics.median(peaks) / 1e6:.0f}", flush=True)
        shutil.rmtree(folder)


def main() -> None:
    """Make the models, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="medium", help="34M, 301M or 1.17B parameters a model")
    parser.add_argument("--experts", type=int, default=3, help="specialists beside the seed (default: 3)")
    parser.add_argument("--recipe", default="btx", help="a file of conf/mix; mergekit knows btx and average")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="with nothing of what is read in the page cache")
    parser.add_argument("--memory", action="store_true", help="peak memory at several numbers of layers and experts")
    parser.add_argument("--mergekit", type=Path, help="folder of mergekit-yaml and mergekit-moe (default: on PATH)")
    parser.add_argument("--folder", type=Path, help="where to work; what is made there is removed")
    arguments = parser.parse_args()
    if arguments.mergekit is None and (found := shutil.which("mergekit-yaml")):
        arguments.mergekit = Path(found).parent
    if arguments.recipe not in ("btx", "average"):
        arguments.mergekit = None
    root = Path(tempfile.mkdtemp(prefix="bench-mix-", dir=arguments.folder))
    try:
        (memory if arguments.memory else compare)(root, arguments)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
