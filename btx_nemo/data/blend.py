"""Prepared domains -> Megatron datasets: training blended by weights, validation one dataset per domain."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from btx_nemo.checkpoints.files import read_json
from btx_nemo.data.indexed import IndexedFile, open_indexed
from btx_nemo.data.prepare import FORMAT, TOKEN_DTYPES
from btx_nemo.data.sources import SPLITS
from btx_nemo.errors import UserError

META = "meta.json"
_VALIDATION_SEED = 0
"""Fixed, so that runs with different training seeds are judged on the same sequences in the same order."""


def list_domains(data_path: Path) -> list[str]:
    """Names of the complete domains under a data folder, sorted."""
    if not Path(data_path).is_dir():
        raise UserError(f"data.path={data_path}: no such folder; make one with btx-nemo prepare-data (or --demo)")
    return sorted(path.parent.name for path in Path(data_path).glob(f"[!.]*/{META}"))


def load_meta(data_path: Path, domain: str) -> dict[str, Any]:
    """`meta.json` of one domain, as `prepare_data` wrote it.

    Raises:
        UserError: the domain is not there (the message lists those that are), or its meta.json is damaged.
    """
    known = list_domains(data_path)
    if domain not in known:
        raise UserError(f"data.path={data_path}: no domain {domain!r}; known: {', '.join(known) or 'none'}")
    path = Path(data_path) / domain / META
    meta = read_json(path)
    size, eod = meta.get("vocab_size"), meta.get("eod_id")
    sound = {
        "format": type(meta.get("format")) is int and meta["format"] == FORMAT,
        "domain": meta.get("domain") == domain,
        "tokenizer_sha256": isinstance(meta.get("tokenizer_sha256"), str),
        "vocab_size": type(size) is int and size > 0,
        "token_dtype": meta.get("token_dtype") in TOKEN_DTYPES,
    }
    within = eod is None or (type(eod) is int and type(size) is int and 0 <= eod < size)
    sound["eod_id"] = "eod_id" in meta and within
    for split in SPLITS:
        counts = meta.get(split)
        sound[split] = isinstance(counts, dict) and all(type(counts.get(key)) is int for key in ("tokens", "documents"))
    for key, good in sound.items():
        if not good:
            shown = repr(meta[key])[:80] if key in meta else "missing"
            raise UserError(f"{path}: {key} is {shown}, which does not belong there; run prepare-data again")
    return meta


def check_data(
    data_path: Path, domains: Sequence[str], vocab_size: int, *, tokenizer_sha256: str | None = None
) -> dict[str, dict[str, Any]]:
    """Check domains against a model before anything is built, and return the meta of each.

    Args:
        data_path: folder that prepare-data wrote.
        domains: names to check.
        vocab_size: rows of the model's embedding (padding rows included).
        tokenizer_sha256: `tokenizer_hash` of the model's tokenizer, when it has one.

    Raises:
        UserError: naming the domain, for another tokenizer, a larger vocabulary, or a damaged file.
    """
    metas = {domain: load_meta(data_path, domain) for domain in domains}
    for domain, meta in metas.items():
        where = f"data.path={data_path}, domain {domain!r}"
        if meta["vocab_size"] > vocab_size:
            raise UserError(
                f"{where}: its tokenizer has {meta['vocab_size']} ids, the model {vocab_size}; "
                "prepare the data with the model's tokenizer"
            )
        reference = tokenizer_sha256 or next(iter(metas.values()))["tokenizer_sha256"]
        if meta["tokenizer_sha256"] != reference:
            whose = "the model's" if tokenizer_sha256 else f"that of domain {next(iter(metas))!r}"
            raise UserError(f"{where}: its tokenizer differs from {whose}; prepare all data with one tokenizer")
        for split in ("train", "valid"):
            indexed = open_indexed(Path(data_path) / domain / split, vocab_size=vocab_size)
            _check_counts(Path(data_path) / domain / META, split, meta, indexed)
    return metas


def _check_counts(path: Path, split: str, meta: dict[str, Any], indexed: IndexedFile) -> None:
    """Raise UserError when meta.json is not that of the index beside it."""
    found = {
        "token_dtype": (meta["token_dtype"], np.dtype(indexed.dtype).name),
        f"{split}.tokens": (meta[split]["tokens"], indexed.num_tokens),
        f"{split}.documents": (meta[split]["documents"], len(indexed.lengths)),
    }
    for key, (said, held) in found.items():
        if said != held:
            raise UserError(f"{path}: {key} is {said} but {split}.idx has {held}; run prepare-data again")


def normalise_weights(weights: dict[str, float], known: Sequence[str]) -> dict[str, float]:
    """Weights that sum to one. Raw values may be percent, or sum to 102.98 as in BTX, Table 7.

    Raises:
        UserError: no weight, an unknown domain, or a weight that is not a positive finite number.
    """
    if not weights:
        raise UserError(f"data.blend: empty; give each domain a weight (known: {', '.join(known) or 'none'})")
    for domain, weight in weights.items():
        if domain not in known:
            raise UserError(f"data.blend: unknown domain {domain!r}; known: {', '.join(known) or 'none'}")
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise UserError(f"data.blend.{domain}={weight}: must be a positive number; leave the domain out to skip it")
    total = math.fsum(weights.values())
    return {domain: weight / total for domain, weight in weights.items()}


class TokenizerInfo:
    """What Megatron's GPTDataset asks of a tokenizer. It has no pad id: no token of the data is taken for padding."""

    def __init__(self, *, vocab_size: int, eod: int | None, sha256: str) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.unique_identifiers = OrderedDict([("class", "btx_nemo"), ("sha256", sha256), ("vocab_size", vocab_size)])


def build_datasets(
    data_path: Path,
    weights: dict[str, float],
    *,
    seq_length: int,
    train_samples: int,
    valid_samples: int | None = None,
    seed: int = 1234,
    cache_dir: Path,
    domains_for_validation: Sequence[str] | None = None,
    vocab_size: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Build the training blend and the validation sets. Needs torch.distributed; must be called on every rank.

    Sequences run over document borders (positions and attention are not reset, the end-of-document token counts in the
    loss). The blend and its order depend on (weights, train_samples, seed, seq_length): keep them for an exact resume.

    Args:
        data_path: folder that prepare-data wrote, one sub-folder per domain.
        weights: raw weights of the training domains, normalised here.
        seq_length: S, tokens per sample.
        train_samples: sequences the whole run will use; domains repeat (reshuffled) when they are smaller than that.
        valid_samples: at most so many sequences per validation domain; None for all of them.
        seed: of the training order. The validation order is always the same.
        cache_dir: where Megatron keeps its index files; on several nodes, a folder they share.
        domains_for_validation: names; default the domains trained on.
        vocab_size: the model's; default the tokenizer's.

    Returns:
        the training dataset (length >= train_samples) and `{domain: validation dataset}`; items are dicts of `tokens`,
        `labels`, `position_ids` [S] int64 and `loss_mask` [S] float32.

    Raises:
        UserError: unknown domain, bad weight, damaged data, or a validation set without a single target token.
    """
    data_path = Path(data_path)
    shares = normalise_weights(weights, list_domains(data_path))
    if train_samples < 1 or seq_length < 2:
        raise UserError(f"data: train_samples={train_samples}, seq_length={seq_length}; need at least 1 and 2")
    validation = list(shares if domains_for_validation is None else domains_for_validation)
    names = list(dict.fromkeys([*shares, *validation]))
    first = load_meta(data_path, names[0])
    metas = check_data(data_path, names, vocab_size or first["vocab_size"])
    cache = Path(cache_dir) / _fingerprint(metas)
    _drop_damaged_cache(cache)
    tokenizer = TokenizerInfo(
        vocab_size=vocab_size or first["vocab_size"], eod=first["eod_id"], sha256=first["tokenizer_sha256"]
    )
    common = {"sequence_length": seq_length, "path_to_cache": str(cache), "tokenizer": tokenizer}
    prefixes = [str(data_path / domain / "train") for domain in shares]
    for domain in shares:
        _need_tokens(open_indexed(data_path / domain / "train"), seq_length=1)
    train = _build(0, prefixes, list(shares.values()), train_samples, random_seed=seed, **common)
    return train, {
        domain: _head(_validation_set(data_path / domain / "valid", common), valid_samples) for domain in validation
    }


def _validation_set(prefix: Path, common: dict[str, Any]) -> Any:
    indexed = open_indexed(prefix)
    _need_tokens(indexed, seq_length=1)
    # A short set keeps its last, padded sequence; a long one must not: Megatron counts those in single precision.
    drop_last = indexed.num_tokens > common["sequence_length"]
    settings = {**common, "random_seed": _VALIDATION_SEED, "drop_last_partial_validation_sequence": drop_last}
    return _build(1, [str(prefix)], None, None, **settings)


def _need_tokens(indexed: IndexedFile, *, seq_length: int) -> None:
    if indexed.num_tokens <= seq_length:
        raise UserError(f"{indexed.prefix}.bin: {indexed.num_tokens} tokens are not enough; prepare more text")


def _build(split: int, prefixes: list[str], weights: list[float] | None, samples: int | None, **config: Any) -> Any:
    """One split (0 train, 1 valid) through Megatron's builder."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    blends: list[Any] = [None, None, None]
    blends[split] = (prefixes, weights if len(prefixes) > 1 else None)
    sizes: list[int | None] = [0, 0, 0]
    sizes[split] = samples
    surplus = 0.005
    if weights and samples:
        # Megatron rounds every domain up and then blends the larger sum; a rare domain needs room for that.
        surplus = max(surplus, (len(weights) + 2 / min(weights)) / samples)
    with _quiet():
        gpt_config = GPTDatasetConfig(
            blend_per_split=blends,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            mid_level_dataset_surplus=surplus,
            **config,
        )
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, gpt_config).build()[split]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Megatron's warning about pad ids: `TokenizerInfo` has none on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The pad token id")
        yield


def _head(dataset: Any, limit: int | None) -> Any:
    from torch.utils.data import Subset

    if limit is None or limit >= len(dataset):
        return dataset
    if limit < 1:
        raise UserError(f"valid_samples={limit}: must be at least 1; raise eval_batches")
    return Subset(dataset, range(limit))


def _fingerprint(metas: dict[str, dict[str, Any]]) -> str:
    """Megatron keys its cache on paths alone; data prepared anew in the same place must not meet the old indices."""
    return hashlib.sha256(json.dumps(metas, sort_keys=True).encode()).hexdigest()[:16]


def _drop_damaged_cache(cache: Path) -> None:
    """Delete index files that a killed run left half-written, and any that would need unpickling.

    Only rank 0 builds, and it builds what is missing.
    """
    import torch

    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    for path in cache.glob("*.npy"):
        if path.is_dir():
            continue
        if not path.is_file() or not _is_whole_array(path):
            path.unlink(missing_ok=True)


def _is_whole_array(path: Path) -> bool:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        return False
    return not array.dtype.hasobject
