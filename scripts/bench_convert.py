"""Time and memory of import, export and loading into a live model at four ranks, against `cp`.

    python scripts/bench_convert.py FOLDER [--size small|large|4x1b] [--turns N]

Makes a Mixtral in FOLDER (0.7, 2.6 or 6.9 GB in bf16; every weight 0.02, which costs no less to convert than others),
then measures each step in a process of its own. `cp -r`, with a sync of what it wrote, and the step, which ends with
one too, take turns, so that both see the same load of the machine and the same page cache. Memory is the highest
resident set of a process above that of an interpreter that has imported what the step imports.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SIZES = {
    "small": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8),
    "large": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8),
    "4x1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22),
}
RANKS = 4
LOAD = """
import os, resource, sys
import torch
from btx_nemo.config.schema import LayoutConfig
from btx_nemo.megatron.load import load_weights
from btx_nemo.megatron.model import build_model
from btx_nemo.megatron.parallel import parallel_state
from btx_nemo.train.source import open_source
from pathlib import Path

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
source, layout = open_source(Path(sys.argv[1])), LayoutConfig(tp=4, ep=4)
with parallel_state(layout, seed=0):
    import megatron.core.models.gpt.gpt_model
    from btx_nemo.routers import router_class
    router_class("top_k")
    before = resident()
    gpt = build_model(source.model, layout, precision="bf16")
    load_weights(gpt, source.expressions, source.readers, seed=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shard = sum(p.numel() * p.element_size() for p in gpt.parameters())
    line = f"rank {os.environ['RANK']}: shard {shard / 1e6:.0f} MB, peak {(peak - before) / 1e6:.0f} MB above {before / 1e6:.0f} MB"
    print(line, flush=True)
"""  # noqa: E501


def run(*command: str) -> float:
    """Seconds that a command takes."""
    begin = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin


def make_model(folder: Path, size: str) -> None:
    """A Mixtral in bf16, streamed to disk."""
    from btx_nemo.checkpoints.files import write_json
    from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
    from btx_nemo.families.architecture import architectures
    from btx_nemo.families.base import layout
    from btx_nemo.plan.execute import execute
    from btx_nemo.plan.expr import Full, Take
    from btx_nemo.plan.plan import Job, Plan

    architecture = architectures()["mixtral"]
    heads = {"num_attention_heads": 32, "num_key_value_heads": 16, "num_local_experts": 4, "vocab_size": 32000}
    model = architecture.read({**SIZES[size], **heads}, "bench")
    shapes = layout(model, "bfloat16")
    infos = {name: shapes[expr.name] for name, expr in architecture.stored(model).items() if isinstance(expr, Take)}
    folder.mkdir(parents=True)
    sink = SafetensorsSink(folder, infos, producer=None)  # as other tools write: without a manifest
    execute(Plan(tuple(Job(name, info, Full(0.02)) for name, info in infos.items()), {}), {}, sink)
    sink.close()
    write_json(folder / "config.json", architecture.write(model, "bfloat16", {}))


STEP = """
import sys, time
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf

def kilobytes(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

step, source, out, verify = sys.argv[1:]
before, begun, cpu = kilobytes("VmRSS"), time.perf_counter(), time.process_time()
(import_hf if step == "import" else export_hf)(source, out, verify=verify)
over = (kilobytes("VmHWM") - before) / 1e3
print(time.perf_counter() - begun, time.process_time() - cpu, over, before / 1e3)
"""


def measure(root: Path, count: int) -> None:
    """Import and export, with and without reading back, in turns with `cp`."""
    size = sum(path.stat().st_size for path in (root / "hf").glob("*.safetensors"))
    for step, source in (("import", "hf"), ("export", "ckpt")):
        for verify in ("false", "tensors"):
            copies, turns = [], []
            for _ in range(count):
                for out in ("copy", "out"):
                    shutil.rmtree(root / out, ignore_errors=True)
                copies.append(run("sh", "-c", f"cp -r '{root / source}' '{root / 'copy'}' && sync '{root / 'copy'}'/*"))
                command = [sys.executable, "-c", STEP, step, str(root / source), str(root / "out"), verify]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                turns.append([float(number) for number in printed.split()])
            seconds, cpu, over, interpreter = min(turns)
            print(
                f"{step} verify={verify}: {seconds:.1f} s ({cpu:.1f} CPU-s), {size / seconds / 1e6:.0f} MB/s, "
                f"{min(copies) / seconds:.2f} of the speed of cp and sync ({min(copies):.1f} s), "
                f"{over:.0f} MB above the interpreter's {interpreter:.0f} MB; load {os.getloadavg()[0]:.0f}",
                flush=True,
            )
            if step == "import" and verify == "false":
                shutil.rmtree(root / "ckpt", ignore_errors=True)
                (root / "out").rename(root / "ckpt")


def main() -> None:
    """Everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    root = arguments.folder
    root.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not (root / "hf").exists():
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench_convert as b; "
        run(sys.executable, "-c", code + f"b.make_model(b.Path({str(root / 'hf')!r}), {arguments.size!r})")
    measure(root, arguments.turns)
    for name in ("hf", "ckpt"):
        (root / "load.py").write_text(LOAD)
        print(f"{name} into a live model, tp={RANKS} ep={RANKS}:", flush=True)
        torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", str(root / "load.py"), str(root / name))
        subprocess.run([sys.executable, *torchrun], check=True)


if __name__ == "__main__":
    main()
