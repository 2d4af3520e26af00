"""The real pipeline, small: three experts, mix, joint training, export."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

from btx_testing.runs import TinyWorld
from btx_testing.slurm import REPO, plain_environment
from btx_testing.text import byte_tokenizer, sentence

EXPERTS = ("expert-math", "expert-code", "expert-prose")
CONFIG = """
runs: ${oc.env:BTX_RUNS}
seed: ${oc.env:BTX_SEED}
data: ${oc.env:BTX_DATA}
experts: {math: {}, code: {}, prose: {}}
expert:
  config: tiny_expert
  nodes: ${oc.decode:${oc.env:NODES}}
  set: &small
    data: {seq_length: 32}
    steps: 80
    micro_batch_size: 1
    global_batch_size: 4
    eval_batches: 1
    log_every: 1
    checkpoint: {every: 40}
    optim: {warmup_steps: 2}
joint:
  config: tiny_mix
  nodes: ${oc.decode:${oc.env:NODES}}
  set: {<<: *small, steps: 100, layout: {ep: 2}}
"""


def make_place(world: TinyWorld, folder: Path) -> Path:
    """Three domains, a seed, and the pipeline's configuration."""
    from btx_nemo.data.prepare import prepare_data

    shutil.copytree(world.data, folder / "data")
    shutil.copytree(world.dense, folder / "seed")
    rng = Random(7)
    (folder / "prose.txt").write_text("".join(sentence(rng) for _ in range(70)))
    prepare_data([folder / "prose.txt"], byte_tokenizer(folder / "tokenizer"), folder / "data", "prose", workers=1)
    (folder / "tiny.yaml").write_text(CONFIG)
    return folder


def environment(place: Path, runs: Path, *, nodes: int) -> dict[str, str]:
    """Two ranks a job, on one node or on two."""
    return plain_environment() | {
        "BTX_RUNS": str(runs),
        "BTX_DATA": str(place / "data"),
        "BTX_SEED": str(place / "seed"),
        "BTX_PYTHON": sys.executable,
        "BTX_NPROC": str(2 // nodes),
        "NODES": str(nodes),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "SBATCH_GRES": "none",
    }


def words(place: Path) -> list[str]:
    """That name the configuration to `btx-nemo submit`."""
    return [f"--config-path={place}", "--config-name=tiny"]


def start_here(place: Path, runs: Path) -> subprocess.Popen[bytes]:
    """The whole pipeline on this machine, without Slurm; it gives way to all else."""
    command = [sys.executable, "-m", "btx_nemo", "submit", "--local", *words(place), "until=export"]
    with (place / "here.log").open("w") as log:
        return subprocess.Popen(
            ["nice", *command],
            env=environment(place, runs, nodes=1),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
