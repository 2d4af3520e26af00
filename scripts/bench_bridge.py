"""Import and export of a Llama or Qwen3Moe folder by Megatron-Bridge and by btx_nemo, in turns, on the CPU.

    ENV/bin/python scripts/bench_bridge.py HF WORK [--turns N]

ENV has this package's dependencies with Python 3.12, torch 2.14, megatron-core 0.19.2 and transformers 5.12, and beside
them, as it does not install as a whole: `pip install peft accelerate datasets nvidia-modelopt megatron-energon` and
`pip install --no-deps megatron-bridge==0.6.2`. Bridge imports Transformer Engine, which no CPU has: a stand-in is
there while it is imported. Its own import_ckpt wants Transformer Engine's layers, so that its bridge is given
Megatron's local ones, and the checkpoint is written and read by Megatron's dist_checkpointing. Each step is a process
of its own; seconds, CPU-seconds and memory count from after the imports.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


class _Anything(type):
    """A class with every attribute, each of which is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _StandIn(types.ModuleType):
    """A module of transformer_engine."""

    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def kilobytes(key: str) -> int:
    """A line of /proc/self/status."""
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])


def bridge(step: str, hf: str, ckpt: str, out: str) -> Any:
    """What does a step with Megatron-Bridge; to be called once its imports are done."""
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import torch

    finder = _Finder()
    sys.meta_path.insert(0, finder)
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    from megatron.core import dist_checkpointing

    from btx_nemo.megatron.platform import cpu_platform

    def local(provider: Any, vp_stage: int | None = None) -> Any:
        experts = getattr(provider, "num_moe_experts", None)
        return specs.get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=bool(provider.qk_layernorm), normalization="RMSNorm"
        )

    def run() -> None:
        with cpu_platform(), temporary_distributed_context("gloo"):
            found = AutoBridge.from_hf_pretrained(hf, torch_dtype=torch.bfloat16)
            provider = found.to_megatron_provider(load_weights=step == "import")
            for fusion in (
                *("apply_rope_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion"),
                *("bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm", "cross_entropy_loss_fusion"),
                *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"),
            ):
                setattr(provider, fusion, False)
            provider.transformer_layer_spec, provider.bf16 = local, True
            provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = torch.bfloat16
            provider.finalize()
            model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
            inner = model[0] if hasattr(model[0], "decoder") else model[0].module
            spelling = {"non_homogeneous_layers": True}
            state = inner.sharded_state_dict(metadata=dict(spelling))
            if step == "import":
                os.makedirs(out)
                dist_checkpointing.save(state, out, content_metadata=spelling)
            else:
                state = dist_checkpointing.load(state, ckpt)
                state.pop("content_metadata", None)
                inner.load_state_dict(state)
                found.save_hf_pretrained(model, out, show_progress=False)

    return run


def ours(step: str, hf: str, ckpt: str, out: str) -> Any:
    """The same with btx_nemo, whose results are not read back here: Bridge's are not either."""
    from btx_nemo.convert.to_hf import export_hf
    from btx_nemo.convert.to_megatron import import_hf

    return lambda: import_hf(hf, out, verify="false") if step == "import" else export_hf(ckpt, out, verify="false")


def child(who: str, step: str, hf: str, ckpt: str, out: str) -> None:
    """One step, and what it cost."""
    run = {"bridge": bridge, "ours": ours}[who](step, hf, ckpt, out)
    before, begun, cpu = kilobytes("VmRSS"), time.perf_counter(), sum(os.times()[:4])
    run()
    seconds, cpu = time.perf_counter() - begun, sum(os.times()[:4]) - cpu
    over = (kilobytes("VmHWM") - before) / 1e3
    load = os.getloadavg()[0]
    print(
        f"{who:6} {step}: {seconds:.2f} s, {cpu:.2f} CPU-s, {over:.0f} MB above {before / 1e3:.0f} MB; load {load:.0f}"
    )


def same_tensors(a: Path, b: Path) -> bool:
    """Whether two folders hold the same tensors."""
    import torch
    from safetensors.torch import load_file

    first, second = ({k: v for p in folder.glob("*.safetensors") for k, v in load_file(p).items()} for folder in (a, b))
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def main() -> None:
    """Both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    for _ in range(arguments.turns):
        for step in ("import", "export"):
            for who in ("bridge", "ours"):
                ckpt, back = arguments.work / f"{who}-ckpt", arguments.work / f"{who}-hf"
                out = ckpt if step == "import" else back
                shutil.rmtree(out, ignore_errors=True)
                given = [who, step, str(arguments.hf), str(ckpt), str(out)]
                ran = subprocess.run(
                    [sys.executable, "-W", "ignore", __file__, "child", *given], capture_output=True, text=True
                )
                print(ran.stdout.strip().splitlines()[-1] if ran.returncode == 0 else ran.stderr[-2000:], flush=True)
    for who in ("bridge", "ours"):
        same = same_tensors(arguments.hf, arguments.work / f"{who}-hf")
        print(f"{who}: there and back the same tensors: {same}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main()
