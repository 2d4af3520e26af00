"""Mixtures that the recipes made of tiny Hugging Face specialists of every family; each is made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from btx_testing import models
from btx_testing.runs import SIZES

WINDOWS = ["sliding_attention", "full_attention"]
SPECIALISTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-yarn", {}),
    "mistral": ("mistral-window", {}),
    "qwen2": ("qwen2-window", {"max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "olmo2": ("olmo2-bias", {}),
    "olmo3": ("olmo3-yarn", {"layer_types": WINDOWS}),
}
"""Family -> its dense model of `models.FAMILIES`, and changes: two layers, one of each kind."""
DOMAINS = ("math", "code")


def write_embeddings(folder: Path, domains: tuple[str, ...], size: int = 6) -> Path:
    """Random domain embeddings in the form that `btx-nemo embed` writes."""
    from safetensors.torch import save_file

    from btx_nemo.checkpoints.manifest import write_manifest

    folder.mkdir(parents=True)
    rows = torch.randn(len(domains), size, generator=torch.Generator().manual_seed(1))
    save_file({"domain_embeddings": rows}, folder / "model.safetensors")
    (folder / "embeddings.json").write_text(json.dumps({"domains": list(domains)}))
    write_manifest(folder, kind="embeddings")
    return folder


class Mixes:
    """Makes what is asked for below one folder, and keeps it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def specialist(self, family: str, number: int) -> Path:
        """Dense model 0 (the seed), 1 (math) or 2 (code)."""
        folder = self.root / family / f"dense_{number}"
        if not folder.exists():
            name, changes = SPECIALISTS[family]
            models.make_model(folder, name, seed=number, **{**SIZES, "rms_norm_eps": 1e-5, **changes})
        return folder

    def mix(self, family: str, recipe: str, **options: Any) -> Path:
        """The mixture by `recipe` of the seed and the specialists; two-expert models are made first where it takes."""
        out = self.root / family / "-".join([recipe, *(f"{key}_{value}" for key, value in options.items())])
        if out.exists():
            return out
        experts = {domain: self.specialist(family, number) for number, domain in enumerate(DOMAINS, 1)}
        if recipe in ("flexolmo", "bar"):
            for domain, folder in experts.items():
                experts[domain] = self._run(family, "two_expert", {domain: folder}, out.parent / f"pair_{domain}")
        if recipe == "nexus":
            options["embeddings"] = str(out.parent / "embeddings")
            write_embeddings(out.parent / "embeddings", DOMAINS)
        return self._run(family, recipe, experts, out, **options)

    def _run(self, family: str, recipe: str, experts: dict[str, Path], out: Path, **options: Any) -> Path:
        from btx_nemo.mix.config import MixConfig
        from btx_nemo.mix.run import run_mix

        if not out.exists():
            places = {name: str(path) for name, path in experts.items()}
            seed = str(self.specialist(family, 0))
            run_mix(
                MixConfig(
                    recipe=recipe, seed=seed, experts=places, out=str(out), router_init_std=0.4, workers=2,
                    options=options,
                )
            )  # fmt: skip
        return out
