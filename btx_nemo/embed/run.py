"""`embed`: one row per domain, the mean of its documents' embeddings, in a folder that recipes read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from btx_nemo.checkpoints.atomic import atomic_dir, refuse_existing
from btx_nemo.checkpoints.files import write_json
from btx_nemo.checkpoints.manifest import source_facts, write_manifest
from btx_nemo.config.domains import check_domain
from btx_nemo.embed.documents import documents
from btx_nemo.embed.embedders import load_embedder
from btx_nemo.errors import UserError
from btx_nemo.families.source import open_source
from btx_nemo.mix.extras import EMBEDDINGS_JSON, EMBEDDINGS_TENSOR

DEFAULT_EMBEDDER = "mean_hidden_state"


def embed_domains(
    model: Path,
    domains: Mapping[str, Path],
    out: Path,
    *,
    embedder: str = DEFAULT_EMBEDDER,
    count: int = 1000,
    length: int = 512,
) -> None:
    """Write `out`: model.safetensors with `domain_embeddings` fp32 [domains, D], embeddings.json, manifest.json.

    Args:
        model: folder of the seed, whose tokenizer the documents have.
        domains: name -> a domain's folder of prepare-data, or text.
        out: folder to write; must not exist.
        embedder: name in the registry.
        count: documents of a domain, at most.
        length: tokens of a document, at most.

    Raises UserError, and leaves nothing behind.
    """
    from safetensors.torch import save_file

    for name in domains:
        check_domain(name, name)
    for option, value in (("documents", count), ("tokens", length)):
        if value < 1:
            raise UserError(f"{option}={value} must be at least 1")
    refuse_existing(out)
    source = open_source(model)
    texts = {
        name: documents(path, source.tokenizer, source.config.vocab_size, count, length)
        for name, path in domains.items()
    }
    embed = load_embedder(embedder, model)
    rows = torch.stack([domain_row(embed(ids), name) for name, ids in texts.items()])
    facts = {
        "domains": list(domains),
        "embedder": embedder,
        "size": rows.shape[1],
        "model": source_facts(source.folder, source.reader.layout()),
        "documents": {name: len(ids) for name, ids in texts.items()},
        "tokens": length,
        "sources": {name: str(path) for name, path in domains.items()},
        "sha256": hashlib.sha256(rows.numpy().tobytes()).hexdigest(),
    }
    with atomic_dir(out, rows.numel() * 4 + (1 << 20)) as folder:
        save_file({EMBEDDINGS_TENSOR: rows}, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / EMBEDDINGS_JSON, facts)
        write_manifest(folder, kind="embeddings")


def domain_row(documents_ND: Tensor, name: str) -> Tensor:
    """[D]: the mean over documents, those with a NaN left out. Raises UserError when none is left."""
    whole = documents_ND[~documents_ND.isnan().any(dim=1)]
    if not len(whole):
        raise UserError(f"{name}: the embedding of every document is NaN; check the model and the documents")
    return whole.double().mean(dim=0).float().contiguous()
