"""Seeds of noise: the same at every layout, in recomputation and in a resumed run.

The training loop gives each micro-batch a seed of its own through torch's CPU generator, which nothing here advances
and Megatron's recomputation restores.
"""

from __future__ import annotations

import torch


def micro_batch_seed() -> int:
    """The seed of the micro-batch that is computed."""
    return torch.initial_seed() % (1 << 63)


def generator_of(device: torch.device, seed: int, *place: int) -> torch.Generator:
    """A fresh generator for a micro-batch and a place in the model (its layer, what the noise is for)."""
    for number in place:
        seed = (seed * 1_000_003 + number) % (1 << 63)
    return torch.Generator(device=device).manual_seed(seed)
