"""Which data a run was started on, so that it does not go on with others: `out`/data.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_json
from btx_nemo.config.schema import TrainConfig
from btx_nemo.data.blend import load_meta
from btx_nemo.errors import UserError
from btx_nemo.train.contents import blend_of

RECORD = "data.json"
KEPT = ("kind", "train", "eod_id", "token_dtype", "tokenizer_sha256", "chat_template_sha256")
"""Of meta.json: not where the text came from."""


def record_data(out: Path, config: TrainConfig) -> None:
    """Remembers what the meta.json of each domain trained on says: documents and tokens, tokenizer, template."""
    write_file(out / RECORD, json.dumps(_facts(config), indent=2) + "\n")


def check_data_record(out: Path, config: TrainConfig) -> None:
    """Raises UserError when the run in `out` was started on other data: the order would be another from then on."""
    if not (out / RECORD).exists():
        return
    now = _facts(config)
    # Versions before kept all of meta.json, and domains for validation too.
    then = {domain: _kept(meta) for domain, meta in read_json(out / RECORD).items() if _trained(domain, meta, now)}
    for domain in [*then, *(name for name in now if name not in then)]:
        if then.get(domain) != now.get(domain):
            raise UserError(
                f"out={out}: was started on other data: {domain} had {_text(then.get(domain))}, now it has "
                f"{_text(now.get(domain))}; put the data back as they were, or choose another out"
            )


def _facts(config: TrainConfig) -> dict[str, Any]:
    metas = {domain: load_meta(Path(config.data.path), domain) for domain in blend_of(config)[0]}
    return {domain: _kept(meta) for domain, meta in metas.items()}


def _kept(meta: Any) -> Any:
    return {key: meta[key] for key in KEPT if key in meta} if isinstance(meta, dict) else meta


def _trained(domain: str, meta: Any, now: dict[str, Any]) -> bool:
    return domain in now or not isinstance(meta, dict) or "sources" not in meta


def _text(meta: Any) -> str:
    try:
        train = meta["train"]
        return f"{train['documents']} documents of {train['tokens']} tokens, tokenizer {meta['tokenizer_sha256'][:8]}"
    except (KeyError, TypeError):
        return "no part in it"
