"""What must hold before a mix begins: checked from settings, headers and tokenizers, before a byte is written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.tokenizer_files import (
    behaviour_differences,
    tokenizer_files,
    vocabulary,
    vocabulary_difference,
)
from btx_nemo.config.domains import check_domain
from btx_nemo.convert.checkpoint import check_dtype, check_shard_size
from btx_nemo.errors import UserError
from btx_nemo.families.source import Source
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.recipes.base import Recipe
from btx_nemo.mix.vocabulary import check_policy

LARGEST_STD = 1e3
SAME = {
    "family": "family",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "qk_norm": "qk_norm",
    "post_norm": "post_norm",
    "sliding_window": "sliding_window",
    "layer_types": "layer_types",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}
"""Settings that all sources must share -> config.json's name of each."""


def check_settings(config: MixConfig, recipe: Recipe) -> None:
    """Raise UserError when the mix's own settings do not make sense for the recipe."""
    count = len(config.experts)
    if recipe.takes == "none" and count:
        raise UserError(f"experts.{next(iter(config.experts))}: recipe={recipe.name} takes no specialists")
    if recipe.takes != "none" and not count:
        raise UserError("experts: none given; name at least one specialist, e.g. experts.math=DIR")
    if recipe.takes == "one" and count > 1:
        raise UserError(f"experts: recipe={recipe.name} takes one specialist, not {count}")
    for name in config.experts:
        check_domain(name, f"experts.{name}")
    for key in ("top_k", "router_init_std"):
        if not recipe.routed and getattr(config, key) is not None:
            raise UserError(f"{key}={getattr(config, key)}: recipe={recipe.name} makes no fresh routing; leave it out")
    if config.top_k is not None and config.top_k < 1:
        raise UserError(f"top_k={config.top_k} must be at least 1")
    if config.router_init_std is not None and not 0 <= config.router_init_std <= LARGEST_STD:
        raise UserError(
            f"router_init_std={config.router_init_std} must be zero or a positive number, at most {LARGEST_STD:g}"
        )
    if not 0 <= config.rng_seed < 1 << 63:
        raise UserError(f"rng_seed={config.rng_seed} must be a whole number from 0 to 2**63 - 1")
    check_policy(config.vocab_policy)
    check_dtype(config.dtype)
    check_shard_size(config.shard_size)
    if config.workers is not None and config.workers < 1:
        raise UserError(f"workers={config.workers} must be at least 1")


def check_sources(seed: Source, experts: list[Source], recipe: Recipe, *, union: bool = False) -> None:
    """Raise UserError naming the folder and both values where a specialist does not fit the seed.

    With `union`, vocabularies have been joined already.
    """
    _check_kinds(seed, experts, recipe)
    reference = seed.layout()
    for expert in experts:
        for field, shown in SAME.items():
            mine, theirs = getattr(expert.config, field), getattr(seed.config, field)
            if mine != theirs:
                raise UserError(
                    f"{expert.folder}: {shown}={mine} but the seed {seed.folder} has {theirs}; "
                    "mix models of one architecture that started from this seed"
                )
        for name, info in expert.layout().items():
            if name in reference and info.dtype != reference[name].dtype:
                raise UserError(
                    f"{expert.where(name)}: tensor {name!r} is {info.dtype} but the seed's is {reference[name].dtype}; "
                    "save all models in one dtype"
                )
    check_tokenizers(seed, experts, union=union)


def _check_kinds(seed: Source, experts: list[Source], recipe: Recipe) -> None:
    """Raise UserError where a dense model is given for a mixture, or the other way round."""
    if recipe.on_mixture and seed.config.moe is None:
        raise UserError(f"{seed.folder}: is a dense model; recipe={recipe.name} changes a mixture")
    dense = [] if recipe.pairs == "either" else experts if recipe.pairs == "never" else []
    for source in dense if recipe.on_mixture else [seed, *dense]:
        if source.config.moe is not None:
            raise UserError(f"{source.folder}: is a mixture already; only dense models can be mixed")
    for source in experts:
        moe = source.config.moe
        if moe is None and recipe.pairs == "always":
            raise UserError(
                f"{source.folder}: is a dense model; recipe={recipe.name} merges mixtures of an anchor and one "
                "domain's expert (recipe=two_expert makes one, to be trained)"
            )
        if moe is not None and (moe.num_experts != 2 or moe.router != "flexolmo" or moe.layers is not None):
            raise UserError(
                f"{source.folder}: is a mixture of {moe.num_experts} experts with router={moe.router}; expected an "
                "anchor and one domain's expert, made by recipe=two_expert"
            )


def check_tokenizers(seed: Source, experts: list[Source], *, union: bool = False) -> None:
    """Raise UserError naming the first token on which two tokenizers differ, or an id beyond the embedding."""
    reference = vocabulary(seed.tokenizer)
    if reference and max(reference.values()) >= seed.config.vocab_size:
        token = max(reference, key=lambda name: reference[name])
        raise UserError(
            f"{seed.tokenizer}/tokenizer.json: token {token!r} has id {reference[token]} but the embedding has "
            f"{seed.config.vocab_size} rows; is it the tokenizer of this model?"
        )
    for expert in experts:
        difference = vocabulary_difference(vocabulary(expert.tokenizer), reference)
        if difference and not union:
            raise UserError(
                f"{expert.tokenizer}/tokenizer.json: {difference} in the seed's {seed.tokenizer}; "
                "specialists must keep the seed's tokenizer"
            )
        _compare_models(seed, expert)
        for part in behaviour_differences(expert.tokenizer, seed.tokenizer):
            if part.startswith("model."):
                raise UserError(
                    f"{expert.tokenizer}/tokenizer.json: {part} differs from the seed's {seed.tokenizer}; "
                    "specialists must keep the seed's tokenizer"
                )


def _compare_models(seed: Source, expert: Source) -> None:
    mine, theirs = expert.tokenizer / "tokenizer.model", seed.tokenizer / "tokenizer.model"
    if mine.is_file() and theirs.is_file() and mine.read_bytes() != theirs.read_bytes():
        raise UserError(f"{mine}: differs from the seed's {theirs}; specialists must keep the seed's tokenizer")


def warnings(seed: Source, experts: list[Source], *, union: bool = False) -> list[str]:
    """What is allowed but seldom meant, one line each, for sources that have passed the checks."""
    found = []
    if not tokenizer_files(seed.tokenizer):
        found.append(f"{seed.folder}: no tokenizer; the mixture will have none")
    known = vocabulary(seed.tokenizer) is not None
    for expert in experts:
        if known != (vocabulary(expert.tokenizer) is not None):
            found.append(f"{seed.folder} and {expert.folder}: only one has tokenizer.json; not compared")
        for part in behaviour_differences(expert.tokenizer, seed.tokenizer):
            if part == "added_tokens" and union:
                continue
            where = f"{expert.tokenizer}/tokenizer.json: {part} differs from the seed's {seed.tokenizer}"
            found.append(f"{where}; the mixture takes the seed's")
    return found


def facts(config: MixConfig, options: Any) -> dict[str, Any]:
    """The recipe and its settings, for the manifest."""
    return {
        "recipe": config.recipe,
        "options": dataclasses.asdict(options),
        "router_init_std": config.router_init_std,
        "seed": config.rng_seed,
        "dtype": config.dtype,
        "vocab_policy": config.vocab_policy,
        "experts": {name: str(Path(path)) for name, path in config.experts.items()},
        "missing": list(config.missing),
    }
