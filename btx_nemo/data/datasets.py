"""Prepared domains -> datasets: training blended by weights or in whole passes, validation one dataset per domain.

Text goes through Megatron's own datasets. Conversations are packed (`packing.py`), and blended in Megatron's order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from btx_nemo.data.blend import check_blend_kinds, check_data, list_domains, load_meta, normalise_weights
from btx_nemo.data.indexed import IndexedFile, open_indexed
from btx_nemo.data.order import Blend, Passes, sample_documents
from btx_nemo.data.packing import PackedChats, pack, sampled
from btx_nemo.data.prepare import TARGETS
from btx_nemo.errors import UserError

_VALIDATION_SEED = 0
"""Fixed, so that runs with different training seeds are judged on the same sequences in the same order."""


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
    whole_passes: bool = False,
    document_mask: bool = False,
    sample: float = 1.0,
) -> tuple[Any, dict[str, Any]]:
    """Build the training blend and the validation sets. Needs torch.distributed; must be called on every rank.

    Sequences of text run over document borders: without `document_mask` positions are not reset, and the token after
    the end of a document counts in the loss. Those of chats never do. The blend and its order depend on (weights,
    train_samples, seed, seq_length): keep them for an exact resume.

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
        whole_passes: instead of weights, each sequence of the domains once before any comes again.
        document_mask: positions of text start again with each document: no attention and no loss across its borders.
        sample: share of each domain's training documents, see `order.sample_documents`.

    Returns:
        the training dataset (length >= train_samples) and `{domain: validation dataset}`; items are dicts of `tokens`,
        `labels`, `position_ids` [S] int64 and `loss_mask` [S] float32; those of chats have `padding` [S] bool as well.

    Raises:
        UserError: unknown domain, bad weight, damaged data, text blended with chats, or chats to train on or a
        validation set without a single target token.
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
    common = {
        "sequence_length": seq_length,
        "path_to_cache": str(cache),
        "tokenizer": tokenizer,
        "reset_position_ids": document_mask,
        "eod_mask_loss": document_mask,
    }
    builder = _Builder(data_path, {name: meta["kind"] for name, meta in metas.items()}, common, seed, sample)
    train = builder.passes(list(shares), train_samples) if whole_passes else builder.blend(shares, train_samples)
    valid = {domain: _head(builder.validation(domain), valid_samples) for domain in validation}
    for domain, dataset in valid.items():
        _need_targets(dataset, data_path / domain / "valid", seq_length)
    return train, valid


@dataclass(frozen=True)
class _Builder:
    """Datasets of the domains of one data folder."""

    data_path: Path
    kinds: dict[str, str]
    common: dict[str, Any]
    """Of Megatron's GPTDatasetConfig."""
    seed: int
    sample: float

    def blend(self, shares: dict[str, float], samples: int) -> Any:
        """Training by weights."""
        kinds = {self.kinds[domain] for domain in shares}
        check_blend_kinds(kinds)
        if kinds == {"text"}:
            for domain in shares:
                _need_tokens(open_indexed(self._prefix(domain)))
            prefixes = [str(self._prefix(domain)) for domain in shares]
            return self._text(0, prefixes, list(shares.values()), samples, self.seed)
        packed = [self._packed(domain, "train") for domain in shares]
        blend = Blend(list(shares.values()), samples)
        needed = [blend.count(number) for number in range(len(packed))]
        blend.datasets = [
            Passes([chats], -(-count // len(chats)), seed=(self.seed, number))
            for number, (chats, count) in enumerate(zip(packed, needed))
        ]
        return blend

    def passes(self, domains: list[str], samples: int) -> Any:
        """Training in whole passes."""
        datasets = []
        for domain in domains:
            if self.kinds[domain] == "chat":
                datasets.append(self._packed(domain, "train"))
            else:
                datasets.append(self._text(0, [str(self._prefix(domain))], None, None, self.seed))
        return Passes(datasets, -(-samples // sum(map(len, datasets))), seed=(self.seed,))

    def validation(self, domain: str) -> Any:
        """All of a domain's validation split, once."""
        prefix = self._prefix(domain, "valid")
        if self.kinds[domain] == "chat":
            return self._packed(domain, "valid")
        indexed = open_indexed(prefix)
        _need_tokens(indexed)
        # A short set keeps its last, padded sequence; a long one must not: Megatron counts those in single precision.
        drop_last = indexed.num_tokens > self.common["sequence_length"]
        return self._text(
            1, [str(prefix)], None, None, _VALIDATION_SEED, drop_last_partial_validation_sequence=drop_last
        )

    def _prefix(self, domain: str, split: str = "train") -> Path:
        return self.data_path / domain / split

    def _packed(self, domain: str, split: str) -> PackedChats:
        prefix, seq_length = self._prefix(domain, split), self.common["sequence_length"]
        packing = pack(*sampled(prefix, self.sample if split == "train" else 1.0), seq_length)
        chats = PackedChats(prefix, prefix.with_name(split + TARGETS), packing, seq_length)
        if split == "train":  # of a validation set only its head is used
            _need_targets(chats, prefix, seq_length)
        return chats

    def _text(
        self,
        split: int,
        prefixes: list[str],
        weights: list[float] | None,
        samples: int | None,
        seed: int,
        **rest: Any,
    ) -> Any:
        """One split (0 train, 1 valid) through Megatron's builder."""
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

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
                reset_attention_mask=False,
                create_attention_mask=False,
                mid_level_dataset_surplus=surplus,
                random_seed=seed,
                **self.common,
                **rest,
            )
            dataset = text_dataset(1.0 if split else self.sample)
            return BlendedMegatronDatasetBuilder(dataset, sizes, lambda: True, gpt_config).build()[split]


@functools.cache
def text_dataset(sample: float) -> Any:
    """Megatron's GPTDataset over a share of the documents of each domain."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    if sample == 1:
        return GPTDataset

    class Sampled(GPTDataset):
        """Over `order.sample_documents`."""

        def __init__(self, dataset: Any, path: str, indices: Any, *args: Any):
            chosen = sample_documents(len(indices), sample, Path(path).parent.name)
            super().__init__(dataset, path, indices[chosen], *args)

    Sampled.__name__ = f"Sampled{sample}"  # a part of Megatron's key to its cache
    return Sampled


def _need_tokens(indexed: IndexedFile) -> None:
    if indexed.num_tokens <= 1:
        raise UserError(f"{indexed.prefix}.bin: {indexed.num_tokens} tokens are not enough; prepare more text")


def _need_targets(dataset: Any, prefix: Path, seq_length: int) -> None:
    if not any(bool(dataset[number]["loss_mask"].any()) for number in range(len(dataset))):
        raise UserError(
            f"{prefix}: none of its {len(dataset)} sequences has a token that is a target: in chats the assistant's "
            f"lie behind data.seq_length={seq_length}; raise it, or prepare other data"
        )


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
