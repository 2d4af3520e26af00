"""The demo data: three real domains from what every Python has, and a tokenizer trained on them. Nothing is downloaded.

out_dir/text/<domain>/{train,valid}.jsonl    the text, one document a line
out_dir/tokenizer/                           byte-level BPE, a Hugging Face tokenizer folder
out_dir/<domain>/...                         as `prepare_data` writes it
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.atomic import atomic_dir
from btx_nemo.checkpoints.files import write_json
from btx_nemo.data.corpora.stdlib import stable_hash
from btx_nemo.data.prepare import DOMAIN_FILES, prepare_data
from btx_nemo.data.sources import SPLITS
from btx_nemo.errors import CheckFailed, UserError

DOMAINS = ("math", "code", "prose")
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SIZES = {"full": 1.5, "small": 0.15}
"""Names for megabytes of text per domain."""
_MIN_SIZE = 0.05
_VALIDATION_FRACTION = 0.08
_VERIFY_EVERY = 10
"""sympy reads one problem in so many; a wrong one stops the build."""

Document = tuple[str, str]
"""Name and text."""


def build_demo_data(
    out_dir: Path,
    *,
    vocab_size: int = 2048,
    size: str | float = "full",
    workers: int | None = None,
    overwrite: bool = False,
) -> dict[str, dict[str, Any]]:
    """Write the demo domains. The content depends on the Python version and the arguments, not on the worker count.

    Args:
        out_dir: new (or empty) folder.
        vocab_size: of the tokenizer, special tokens included; reached exactly.
        size: megabytes of text per domain, or `full` (1.5) or `small` (0.15). A domain that runs out is smaller.
        workers: processes that tokenise.
        overwrite: replace `out_dir`, if it holds nothing but the demo data.

    Returns:
        the meta.json of each domain.

    Raises:
        UserError: the folder is in use, or vocab_size or size is out of range.
    """
    out_dir = Path(out_dir)
    limit = int(_megabytes(size) * 1e6)
    if not 300 <= vocab_size <= 32_000:
        raise UserError(f"vocab_size={vocab_size}: choose 300 to 32000 for the demo's tokenizer")
    if out_dir.is_dir() and not any(out_dir.iterdir()):
        out_dir.rmdir()
    if out_dir.exists() and not overwrite:
        raise UserError(f"{out_dir}: exists; choose another folder, or pass --overwrite")
    if foreign := _foreign(out_dir):
        raise UserError(f"{out_dir}: holds {foreign}, which is not the demo's; choose another folder")
    with atomic_dir(out_dir, overwrite=overwrite) as scratch:
        splits = demo_splits(limit)
        for domain, (train, valid) in splits.items():
            _write_jsonl(scratch / "text" / domain / "train.jsonl", train)
            _write_jsonl(scratch / "text" / domain / "valid.jsonl", valid)
        train_tokenizer([train for train, _ in splits.values()], scratch / "tokenizer", vocab_size)
        return {
            domain: prepare_data(
                [scratch / "text" / domain / "train.jsonl"],
                scratch / "tokenizer",
                scratch,
                domain,
                validation_inputs=[scratch / "text" / domain / "valid.jsonl"],
                workers=workers,
            )
            for domain in splits
        }


def _foreign(out_dir: Path) -> str | None:
    """The first thing in a folder that `build_demo_data` did not write; None without one."""
    ours = {f"tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")}
    for domain in DOMAINS:
        ours |= {f"{domain}/{name}" for name in DOMAIN_FILES}
        ours |= {f"text/{domain}/{split}.jsonl" for split in SPLITS}
    folders = {parent.as_posix() for name in ours for parent in Path(name).parents}
    for root, below, files in os.walk(out_dir):
        inside = Path(root).relative_to(out_dir)
        for name in sorted(below):
            path = (inside / name).as_posix()
            if path not in folders or (Path(root) / name).is_symlink():
                return path
        for name in sorted(files):
            if (inside / name).as_posix() not in ours:
                return (inside / name).as_posix()
    return None


def _megabytes(size: str | float) -> float:
    value = SIZES.get(size) if isinstance(size, str) and size in SIZES else size
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UserError(f"size={size!r}: give megabytes per domain, or one of {', '.join(SIZES)}") from error
    if not _MIN_SIZE <= number <= 100:
        raise UserError(f"size={size}: choose {_MIN_SIZE} to 100 megabytes per domain")
    return number


def demo_splits(limit: int) -> dict[str, tuple[list[Document], list[Document]]]:
    """Training and validation documents of each domain, about `limit` characters in all per domain."""
    from btx_nemo.data.corpora.code import code_documents
    from btx_nemo.data.corpora.prose import prose_documents

    return {
        "math": _math_split(limit),
        "code": _split(_take(code_documents(), limit)),
        "prose": _split(_take(prose_documents(), limit)),
    }


def _take(documents: Iterable[Document], limit: int) -> list[Document]:
    """Documents up to `limit` characters, at least two; none longer than a 25th of it: a small set has variety too."""
    taken: list[Document] = []
    total = 0
    longest = max(2000, limit // 25)
    for name, text in documents:
        if len(text) > longest:
            text = text[: text.rfind("\n", 0, longest) + 1] or text[:longest]
        if len(taken) >= 2 and total + len(text) > limit:
            break
        taken.append((name, text))
        total += len(text)
    return taken


def _split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """By document: those with the lowest hash of their name go to validation, up to the fraction, at least one."""
    wanted = _VALIDATION_FRACTION * sum(len(text) for _, text in documents)
    held_out: set[str] = set()
    taken = 0
    for name, text in sorted(documents, key=lambda document: stable_hash("split/" + document[0])):
        if not held_out or taken + len(text) <= wanted:
            held_out.add(name)
            taken += len(text)
    train = [document for document in documents if document[0] not in held_out]
    return train, [document for document in documents if document[0] in held_out]


def _math_split(limit: int) -> tuple[list[Document], list[Document]]:
    """By problem, before they are put on worksheets."""
    from btx_nemo.data.corpora.math import problems, verify, worksheets

    chosen = {}
    total = 0
    for number, problem in enumerate(problems()):
        if number % _VERIFY_EVERY == 0 and not verify(problem):
            raise CheckFailed(f"demo math: sympy disagrees with the answer of {problem.text!r}; please report this")
        total += len(problem.text) + 1
        if total > limit:
            break
        chosen[problem.key] = problem
    train, valid = _split([(key, problem.text) for key, problem in chosen.items()])
    sheets = []
    for name, part in (("train", train), ("valid", valid)):
        texts = worksheets([chosen[key] for key, _ in part])
        sheets.append([(f"{name}/{number}", text) for number, text in enumerate(texts)])
    return sheets[0], sheets[1]


def train_tokenizer(corpora: Sequence[list[Document]], folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE on equal shares of the corpora and save it as a Hugging Face folder.

    Digits stand alone, as in Llama: a number is read digit by digit. Id 0 is `<|endoftext|>`, begin and end of text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    share = min(sum(len(text) for _, text in corpus) for corpus in corpora)
    texts = [text for corpus in corpora for _, text in _take(corpus, share)]
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"vocab_size={vocab_size}: the text yields only {tokenizer.get_vocab_size()} tokens; "
            "lower it, or raise size"
        )
    _save_tokenizer(tokenizer, folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # known to transformers 4.57 and 5
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        **special,
    }
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        write_json(folder / name, content)


def _write_jsonl(path: Path, documents: Sequence[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as stream:
        for name, text in documents:
            stream.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
