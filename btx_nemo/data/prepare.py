"""`prepare-data`: text files, folders and JSONL -> Megatron `.bin/.idx`, one folder per domain.

out_dir/tokenizer/                  copied, the same for all domains
out_dir/<domain>/train.{bin,idx}    valid.{bin,idx}    meta.json (written last)

Conversations have train.targets.{bin,idx} and valid.targets.{bin,idx} as well: uint8, 1 where the loss is taken.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.atomic import atomic_dir
from btx_nemo.checkpoints.files import read_json, write_json
from btx_nemo.config.domains import check_domain
from btx_nemo.data.chat import ChatEncoder, load_chat_encoder, template_hash
from btx_nemo.data.encode import Encoded, Job, encode_all
from btx_nemo.data.sources import SPLITS, Piece, Source, find_sources, plan_tasks
from btx_nemo.data.tokenizer import Encoder, keep_tokenizer, load_encoder, tokenizer_hash
from btx_nemo.errors import UserError
from btx_nemo.plan.progress import byte_progress
from btx_nemo.plan.workers import default_workers

FORMAT = 1
"""Version of meta.json."""
TOKEN_DTYPES = ("uint16", "int32")
"""Of the ids in `.bin`: the first while the vocabulary fits."""
KINDS = ("text", "chat")
TARGETS = ".targets"
"""Behind the name of a split, the files that say where the loss of conversations is taken."""
DOMAIN_FILES = (
    "meta.json",
    *(f"{split}{targets}.{suffix}" for split in SPLITS for targets in ("", TARGETS) for suffix in ("bin", "idx")),
)
"""All that a domain's folder may hold."""


def prepare_data(
    inputs: Sequence[Path],
    tokenizer: Path,
    out_dir: Path,
    domain: str,
    *,
    text_key: str = "text",
    workers: int | None = None,
    validation_fraction: float = 0.02,
    validation_inputs: Sequence[Path] | None = None,
    append_eod: bool = True,
    eod_token: str | None = None,
    pattern: str = "*",
    overwrite: bool = False,
    chat: bool = False,
    chat_template: Path | None = None,
    messages_key: str = "messages",
) -> dict[str, Any]:
    """Tokenise one domain. The result depends on the inputs alone, not on the number of workers.

    Each text file is a document, each line of a `.jsonl` file is one. Text is split into training and validation
    by file, JSONL by the hash of each document, one single text file near its end. Documents without text are
    left out.

    Args:
        inputs: text files, JSONL files, or folders of them (walked in sorted order).
        tokenizer: folder of a Hugging Face tokenizer, or a tokenizer.json.
        out_dir: data folder; the domain becomes a sub-folder.
        domain: name of lower-case letters, digits, `_` and `-` that starts with a letter.
        text_key: key of the text in each JSONL line.
        workers: processes; default the CPUs that this process may use.
        validation_fraction: share of validation, between 0 and 1.
        validation_inputs: inputs of the validation split; nothing is split then.
        append_eod: end each document with the end-of-document token.
        eod_token: that token; default the tokenizer's end-of-sequence token.
        pattern: which files of a folder to take, such as `*.py`.
        overwrite: replace an existing domain.
        chat: each JSONL line is a conversation, see `chat.py`; no end-of-document token but the template's own.
        chat_template: file with the template of conversations; default the tokenizer's.
        messages_key: key of the messages in each line.

    Returns:
        the content of meta.json.

    Raises:
        UserError: bad name, missing or unreadable input, no tokens, an empty split, another tokenizer, existing output.
    """
    out_dir = Path(out_dir)
    _check_arguments(domain, workers, validation_fraction, out_dir / domain, overwrite)
    text = _load_encoder(tokenizer, eod_token, append_eod and not chat)
    sources = find_sources(inputs, pattern)
    validation = _validation_sources(validation_inputs, sources, pattern)
    every = [*sources, *(validation or [])]
    job = Job(
        tokenizer=Path(tokenizer),
        eod_token=eod_token,
        append_eod=append_eod and not chat,
        text_key=text_key,
        validation_fraction=validation_fraction,
        dtype=TOKEN_DTYPES[text.vocab_size > 1 << 16],
        chat=chat,
        chat_template=chat_template,
        messages_key=messages_key,
    )
    encoder = _load_chat_encoder(job, text, every) if chat else text
    if (out_dir / "tokenizer").exists():
        keep_tokenizer(tokenizer, out_dir / "tokenizer")  # refuses another one before the work, not after
    with _unmade_after_failure(out_dir), atomic_dir(out_dir / domain, overwrite=overwrite) as scratch:
        tasks = plan_tasks(sources, validation, validation_fraction)
        results = encode_all(tasks, job, encoder, workers or default_workers())
        with byte_progress(sum(source.size for source in every), f"tokenising {domain}") as advance:
            counts = _write(scratch, zip(tasks, results), job, advance)
        _check_counts(counts, inputs, validation_fraction)
        meta = {
            **_describe(domain, job, encoder),
            "validation_fraction": None if validation is not None else validation_fraction,
            **counts,
            "sources": [{"path": _source_name(source.path, out_dir), "bytes": source.size} for source in every],
        }
        keep_tokenizer(tokenizer, out_dir / "tokenizer")
        write_json(scratch / "meta.json", meta)
    return meta


@contextlib.contextmanager
def _unmade_after_failure(folder: Path) -> Iterator[None]:
    """Removes the folders down to `folder` that were not there before, unless they hold something by then."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


def _load_encoder(tokenizer: Path, eod_token: str | None, append_eod: bool) -> Encoder:
    encoder = load_encoder(tokenizer, eod_token=eod_token)
    if append_eod and encoder.eod_id is None:
        raise UserError(
            f"--tokenizer {tokenizer}: no end-of-document token in it; name one with --eod-token, or --no-eod"
        )
    return encoder


def _load_chat_encoder(job: Job, text: Encoder, every: Sequence[Source]) -> ChatEncoder:
    other = next((source.path for source in every if not source.jsonl), None)
    if other is not None:
        raise UserError(f"{other}: conversations are lines of JSON; give .jsonl files")
    return load_chat_encoder(job.tokenizer, text, job.chat_template, job.messages_key)


def _describe(domain: str, job: Job, loaded: Encoder | ChatEncoder) -> dict[str, Any]:
    """What meta.json says of the tokens."""
    encoder = loaded.encoder if isinstance(loaded, ChatEncoder) else loaded
    chat = {"chat_template_sha256": template_hash(loaded.template)} if isinstance(loaded, ChatEncoder) else {}
    return {
        "format": FORMAT,
        "kind": KINDS[job.chat],
        **chat,
        "domain": domain,
        "tokenizer_sha256": tokenizer_hash(job.tokenizer),
        "vocab_size": encoder.vocab_size,
        "eod_id": encoder.eod_id,
        "append_eod": job.append_eod,
        "token_dtype": job.dtype,
    }


def _source_name(path: Path, out_dir: Path) -> str:
    """As given, but relative for text that lies in the data folder itself (the demo's), which may be moved."""
    return path.relative_to(out_dir).as_posix() if path.is_relative_to(out_dir) else str(path)


def _check_arguments(domain: str, workers: int | None, fraction: float, target: Path, overwrite: bool) -> None:
    check_domain(domain, f"--domain {domain!r}")
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: must be at least 1")
    if not 0 < fraction < 1:
        raise UserError(f"--validation-fraction {fraction}: must lie between 0 and 1")
    if target.exists() and not overwrite:
        raise UserError(f"{target}: exists; choose another name or folder, or pass --overwrite")
    if os.path.lexists(target):
        check_replaceable(target)


def check_replaceable(target: Path) -> None:
    """Raise UserError unless `target` is a domain that `prepare_data` wrote, and nothing else: it will be deleted."""
    remedy = "so --overwrite leaves it; choose another name or folder, or move it away"
    if target.is_symlink() or not target.is_dir() or not (target / "meta.json").is_file():
        raise UserError(f"{target}: is no domain that prepare-data wrote, {remedy}")
    if foreign := sorted({path.name for path in target.iterdir()} - {*DOMAIN_FILES}):
        raise UserError(f"{target}: holds {foreign[0]!r}, which is not the domain's, {remedy}")
    if not {"format", "domain", "tokenizer_sha256"} <= read_json(target / "meta.json").keys():
        raise UserError(f"{target}: its meta.json is not of prepare-data, {remedy}")


def _validation_sources(given: Sequence[Path] | None, train: list[Source], pattern: str) -> list[Source] | None:
    if given is None:
        return None
    sources = find_sources(given, pattern)
    both = {os.path.realpath(source.path) for source in train} & {os.path.realpath(source.path) for source in sources}
    if both:
        raise UserError(f"validation_inputs: {min(both)} is also a training input; take it out of one of them")
    return sources


def _write(
    scratch: Path,
    encoded: Iterable[tuple[tuple[Piece, ...], dict[str, Encoded]]],
    job: Job,
    advance: Callable[[int], None],
) -> dict[str, dict[str, int]]:
    """Append the documents in order through Megatron's builder; return the counts of each split."""
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a machine without Apex, importing Megatron says so four times
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dtypes = {"": getattr(np, job.dtype)} | ({TARGETS: np.uint8} if job.chat else {})
    builders = {
        split + kind: IndexedDatasetBuilder(str(scratch / f"{split}{kind}.bin"), dtype=dtype)
        for split in SPLITS
        for kind, dtype in dtypes.items()
    }
    counts = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
    for task, result in encoded:
        for split, part in result.items():
            start = 0
            for length in part.lengths:
                for kind, values in zip(dtypes, (part.ids, part.targets)):
                    builders[split + kind].add_document(values[start : start + length], [length])
                start += length
            counts[split]["tokens"] += start
            counts[split]["documents"] += len(part.lengths)
            counts[split]["bytes"] += part.num_bytes
            if job.chat:
                counts[split]["targets"] = counts[split].get("targets", 0) + int(part.targets.sum(dtype=np.int64))
        advance(sum(piece.end - piece.start for piece in task))
    for name, builder in builders.items():
        builder.finalize(str(scratch / f"{name}.idx"))
    return counts


def _check_counts(counts: dict[str, dict[str, int]], inputs: Sequence[Path], fraction: float) -> None:
    first = str(inputs[0]) + (" ..." if len(inputs) > 1 else "")
    if not counts["train"]["tokens"] + counts["valid"]["tokens"]:
        raise UserError(f"{first}: text with no tokens; give files that hold text")
    for split, name in (("train", "training"), ("valid", "validation")):
        if not counts[split]["tokens"]:
            raise UserError(
                f"{first}: the {name} split is empty at --validation-fraction {fraction}; "
                "give more files or documents, or another fraction"
            )
