"""What a run sees of each training domain: documents, tokens, sequences, known from the index files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from btx_nemo.config.schema import TrainConfig
from btx_nemo.data.blend import list_domains, load_meta
from btx_nemo.data.packing import pack, sampled
from btx_nemo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Content:
    """One domain's training split, or a sample of it, in sequences of the run's length."""

    kind: str
    """text or chat."""
    documents: int
    tokens: int
    sequences: int
    """Of one pass."""
    places: int = 0
    """Of these sequences, that conversations take in all."""
    cut: int = 0
    """Conversations that are longer than a sequence."""
    lost: int = 0
    """Tokens at their ends, which are not seen."""

    def text(self, seq_length: int) -> str:
        """In words."""
        if self.kind == "text":
            return f"{self.documents} documents, {self.tokens} tokens, {self.sequences} sequences"
        full = self.places / (self.sequences * seq_length)
        cut = f"; {self.cut} are longer than a sequence and lose {self.lost} tokens" if self.cut else ""
        return f"{self.documents} conversations, {self.tokens} tokens, {self.sequences} sequences {full:.1%} full{cut}"


def blend_of(config: TrainConfig) -> tuple[dict[str, float], list[str]]:
    """Raw weights of the training domains, and the domains to validate on: by default all of the kind that trains.

    Chats among texts would keep every sequence's documents apart, which costs the fast attention. Of domains that are
    not used nothing is read where `data.valid` names those that are.

    `data.blend` comes first: the paper's experts, each of a domain, see several sources.
    """
    if config.domain is not None and not config.domain:
        raise UserError("domain: empty; name a domain, or give domain=null and data.blend")
    if config.epochs is not None and config.data.blend:
        raise UserError(f"epochs={config.epochs} and data.blend: every sequence comes as often; give steps or tokens")
    domains = list_domains(Path(config.data.path))
    if not domains:
        raise UserError(
            f"data.path={config.data.path}: no prepared domain in it; make one: btx-nemo prepare-data INPUTS "
            f"--domain NAME --tokenizer DIR --out {config.data.path}"
        )
    blend = config.data.blend or dict.fromkeys([config.domain] if config.domain else domains, 1.0)
    if config.data.valid:
        return blend, config.data.valid
    kind = {domain: load_meta(Path(config.data.path), domain)["kind"] for domain in (*blend, *domains)}
    kinds = {kind[domain] for domain in blend}
    return blend, [domain for domain in domains if kind[domain] in kinds]


def contents_of(config: TrainConfig) -> dict[str, Content]:
    """The content of each training domain.

    Raises:
        UserError: a share that is none, unknown or damaged data, or, with `epochs`, a domain without a single sequence.
    """
    data = config.data
    if not 0 < data.sample <= 1:
        raise UserError(f"data.sample={data.sample}: must be above 0 and at most 1")
    contents = {}
    for domain in blend_of(config)[0]:
        kind = load_meta(Path(data.path), domain)["kind"]
        lengths, documents = sampled(Path(data.path) / domain / "train", data.sample)
        tokens = int(lengths[documents].sum(dtype=np.int64))
        counts = {"kind": kind, "documents": len(documents), "tokens": tokens}
        if kind == "chat":
            packing = pack(lengths, documents, data.seq_length)
            counts |= {"sequences": len(packing.sequences), "places": packing.places}
            counts |= {"cut": packing.cut, "lost": packing.lost}
        else:
            counts["sequences"] = max(tokens - 1, 0) // data.seq_length
        contents[domain] = Content(**counts)
        if config.epochs is not None and not contents[domain].sequences:
            raise UserError(
                f"data.path={data.path}, domain {domain!r}: {tokens} tokens are less than a sequence of "
                f"data.seq_length={data.seq_length}; lower it, or leave the domain out"
            )
    return contents
