"""Prepared domains as a run finds them: which there are, whether they fit the model, and what share each has."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from btx_nemo.checkpoints.files import read_json
from btx_nemo.data.indexed import IndexedFile, open_indexed
from btx_nemo.data.prepare import FORMAT, KINDS, TARGETS, TOKEN_DTYPES
from btx_nemo.data.sources import SPLITS
from btx_nemo.errors import UserError

META = "meta.json"
LEAST_SHARE = 1e-6
"""Of a domain in a blend: Megatron's index of the others grows with the inverse, to 2 million sequences at this."""
MOST_WEIGHT = 1e100


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
    meta = {"kind": KINDS[0], **read_json(path)}  # older ones are all text
    size, eod = meta.get("vocab_size"), meta.get("eod_id")
    sound = {
        "format": type(meta.get("format")) is int and meta["format"] == FORMAT,
        "kind": meta["kind"] in KINDS,
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
            if meta["kind"] == "chat":
                _check_targets(indexed)
    return metas


def _check_targets(indexed: IndexedFile) -> None:
    """Raise UserError when the file that says where the loss is taken is not that of the tokens beside it."""
    targets = open_indexed(indexed.prefix.with_name(indexed.prefix.name + TARGETS), vocab_size=2)
    if targets.dtype != np.uint8 or not np.array_equal(targets.lengths, indexed.lengths):
        raise UserError(f"{targets.prefix}.idx: is not that of {indexed.prefix.name}.idx; run prepare-data again")


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
        UserError: no weight, an unknown domain, a weight that is not a positive number up to MOST_WEIGHT, or one
            that is less than LEAST_SHARE of the whole.
    """
    if not weights:
        raise UserError(f"data.blend: empty; give each domain a weight (known: {', '.join(known) or 'none'})")
    for domain, weight in weights.items():
        if domain not in known:
            raise UserError(f"data.blend: unknown domain {domain!r}; known: {', '.join(known) or 'none'}")
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not 0 < weight <= MOST_WEIGHT:
            raise UserError(
                f"data.blend.{domain}={str(weight)[:40]}: must be a positive number, at most {MOST_WEIGHT:g}; "
                "leave the domain out to skip it"
            )
    total = math.fsum(weights.values())
    shares = {domain: weight / total for domain, weight in weights.items()}
    rare = min(shares, key=shares.__getitem__)
    if shares[rare] < LEAST_SHARE:
        raise UserError(
            f"data.blend.{rare}={weights[rare]}: less than {LEAST_SHARE:g} of the blend; "
            "raise it, or leave the domain out"
        )
    return shares


def check_blend_kinds(kinds: Collection[str]) -> None:
    """Raise UserError for domains of several kinds (text, chat): only whole passes (epochs) go over both."""
    if len(set(kinds)) > 1:
        raise UserError(
            "data.blend: text and chats cannot be weighed against each other; train on one kind a stage, or give epochs"
        )
