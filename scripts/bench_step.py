"""Step time of our training loop as a ratio to a bare loop over the same Megatron model, schedule and optimizer.

    python scripts/bench_step.py [--pairs 20] [--seq-length 256]
    torchrun --nproc-per-node 2 scripts/bench_step.py --tp 2

Ours is the loop of `btx-nemo train` itself (`Run.steps`): batches from blended files, the training step with its loss
over all ranks and by domain, the check that all is finite, routing statistics and a line of metrics every ten steps,
the progress line, the hang detector, and the agreement on whether to stop. The bare loop has one batch in memory and
calls Megatron alone. Both take turns, a step each on the same weights, so that what else the machine does falls on
both; `cpu` counts this process's processor time alone. In the last row the bare loop trains a second model with
Megatron's own router and balance loss. Aim: at most 1.03.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from btx_nemo.config.schema import DataConfig, LayoutConfig, OptimConfig, TrainConfig
from btx_nemo.families.config import ModelConfig, MoEConfig

LOG_EVERY = 10


def make_data(root: Path) -> Path:
    """Two domains of random words with a byte-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from btx_nemo.data.prepare import prepare_data

    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (root / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(root / "tokenizer" / "tokenizer.json"))
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    for number, domain in enumerate(("a", "b")):
        words, file = random.Random(number), root / f"{domain}.jsonl"
        lines = (json.dumps({"text": " ".join(str(words.random()) for _ in range(200))}) for _ in range(200))
        file.write_text("\n".join(lines) + "\n")
        prepare_data([file], root / "tokenizer", root / "data", domain, workers=1)
    return root / "data"


def make_config(options: argparse.Namespace, layout: LayoutConfig, data: Path, out: Path, mixture: bool) -> TrainConfig:
    """The demo's model; its experts are the dense model's feed-forward block."""
    model = ModelConfig(
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=352,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=32,
        vocab_size=2048,
        tie_word_embeddings=True,
        moe=MoEConfig(num_experts=4, top_k=2) if mixture else None,
    )
    return TrainConfig(
        stage="mix" if mixture else "expert",
        out=str(out),
        model=model,
        data=DataConfig(path=str(data), seq_length=options.seq_length),
        layout=layout,
        steps=1000,
        micro_batch_size=4,
        global_batch_size=16,
        optim=OptimConfig(lr=1e-3, warmup_steps=10),
        log_every=LOG_EVERY,
        eval_every=0,
        eval_batches=1,
    )


def with_megatrons_router(config: TrainConfig) -> Any:
    """A trainee with the router and the balance loss that Megatron has of its own."""
    from btx_nemo.train.setup import build_trainee
    from btx_nemo.train.source import fresh_source

    assert config.model is not None
    source = fresh_source(config.model)
    import btx_nemo.megatron.model as model_module
    import btx_nemo.megatron.specs as specs

    ours = model_module.transformer_config

    def with_aux_loss(*args: Any, **kwargs: Any) -> Any:
        settings = ours(*args, **kwargs)
        settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff = "aux_loss", 0.01
        return settings

    with (
        mock.patch.object(model_module, "transformer_config", with_aux_loss),
        mock.patch.object(specs, "with_router", lambda mlp, router: mlp),
    ):
        return build_trainee(config, source)


def our_run(config: TrainConfig) -> Any:
    """The run that `btx-nemo train` would make of it."""
    from btx_nemo.train.prepare import prepare
    from btx_nemo.train.run import Run
    from btx_nemo.train.signals import StopRequest

    prepared = prepare(config)
    prepared.out.mkdir(exist_ok=True)
    run = Run(config, prepared, StopRequest())
    run.build()
    return run


def bare_loop(config: TrainConfig, trainee: Any) -> Iterator[None]:
    """A step of Megatron alone at each `next`, on one batch that is in memory."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from btx_nemo.megatron.platform import device

    size, length = config.micro_batch_size, config.data.seq_length
    ids = torch.randint(0, 257, (size, length + 1), generator=torch.Generator().manual_seed(0)).to(device())
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(length, device=device())[None].expand(size, -1).contiguous()

    def forward_step(_: Any, model: Any) -> tuple[Any, Callable]:
        losses = model(tokens, positions, None, labels=labels)
        return losses, lambda x: (x.float().mean(), {"loss": x.detach().float().mean()})

    microbatches = config.global_batch_size // (size * mpu.get_data_parallel_world_size())
    trainee.wrapped[0].train()
    while True:
        trainee.wrapped[0].zero_grad_buffer()
        trainee.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=trainee.wrapped,
            num_microbatches=microbatches,
            seq_length=length,
            micro_batch_size=size,
            forward_only=False,
        )
        trainee.optimizer.step()
        trainee.scheduler.step(increment=1)
        yield


def compare(ours: Iterator[Any], bare: Iterator[None], pairs: int) -> dict[str, float]:
    """Median seconds a step of both, and the median over pairs of the ratio, by wall clock and by processor time."""
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
    loops: list[tuple[str, Iterator[Any]]] = [("ours", ours), ("bare", bare)]
    for _, loop in loops * 3:
        next(loop)  # not counted: the first steps allocate
    for number in range(pairs):
        for name, loop in loops if number % 2 else reversed(loops):
            if torch.distributed.get_world_size() > 1:
                torch.distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            next(loop)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    both = list(zip(times["ours"], times["bare"]))
    return {
        "ours": statistics.median(wall for wall, _ in times["ours"]),
        "bare": statistics.median(wall for wall, _ in times["bare"]),
        "wall": statistics.median(o[0] / b[0] for o, b in both),
        "cpu": statistics.median(o[1] / b[1] for o, b in both),
    }


def main() -> None:
    """Prints the table; on the first rank only."""
    from btx_nemo.megatron.parallel import parallel_state
    from btx_nemo.megatron.platform import backend

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="steps of each loop (default 20)")
    parser.add_argument("--seq-length", type=int, default=256)
    for name in ("tp", "pp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # what Megatron says of a machine without a GPU
    first = os.environ.get("RANK", "0") == "0"
    if "RANK" in os.environ:  # once for all rows: the launcher's store serves one start of the process group
        torch.distributed.init_process_group(backend())
    root = tempfile.mkdtemp(prefix="bench-step-") if first else ""
    try:
        if first:
            make_data(Path(root))
            print(f"{'':28} {'ours ms':>8} {'bare ms':>8} {'wall':>6} {'cpu':>6}")
        for label, mixture, other in (
            ("dense", False, False),
            ("mixture", True, False),
            ("mixture, Megatron's router", True, True),
        ):
            layout = LayoutConfig(tp=options.tp, pp=options.pp, ep=options.ep if mixture else 1)
            with parallel_state(layout, seed=1):  # waits for the first rank, which makes the data
                folder = [root]
                torch.distributed.broadcast_object_list(folder)
                place = Path(folder[0])
                config = make_config(options, layout, place / "data", place / label, mixture)
                run = our_run(config)
                rival = with_megatrons_router(config) if other else run.trainee
                with run.hang, run.reporting(0), contextlib.redirect_stderr(io.StringIO()):
                    facts = compare(run.steps(0), bare_loop(config, rival), options.pairs)
            if first:
                print(
                    f"{label:28} {1e3 * facts['ours']:>8.1f} {1e3 * facts['bare']:>8.1f} "
                    f"{facts['wall']:>6.3f} {facts['cpu']:>6.3f}",
                    flush=True,
                )
    finally:
        if first:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
