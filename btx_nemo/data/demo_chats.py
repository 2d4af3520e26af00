"""The demo's text as conversations, for the stages that fine-tune on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.atomic import atomic_dir
from btx_nemo.data.demo import DOMAINS, END_OF_TEXT
from btx_nemo.data.prepare import prepare_data
from btx_nemo.errors import UserError

TEMPLATE = f"""\
{{% for message in messages %}}<{{{{ message['role'] }}}}>
{{{{ message['content'] }}}}{END_OF_TEXT}
{{% endfor %}}{{% if add_generation_prompt %}}<assistant>
{{% endif %}}
"""
LONGEST = 700
"""Characters of a question, and of an answer."""
MOST = 1500
"""Conversations of a domain."""

Chat = list[dict[str, str]]


def build_demo_chats(data: Path, out_dir: Path, *, workers: int | None = None) -> dict[str, dict[str, Any]]:
    """Write conversations of the demo's domains, as `prepare_data` does.

    Args:
        data: the folder that `build_demo_data` wrote.
        out_dir: new (or empty) folder; out_dir/text has the conversations.
        workers: processes that tokenise.

    Returns:
        the meta.json of each domain.

    Raises:
        UserError: `data` is not the demo's, or `out_dir` is in use.
    """
    texts = {domain: data / "text" / domain / "train.jsonl" for domain in DOMAINS}
    for path in texts.values():
        if not path.is_file():
            raise UserError(f"{path}: not there; give the folder that prepare-data --demo --out made")
    if out_dir.is_dir() and not any(out_dir.iterdir()):
        out_dir.rmdir()
    if out_dir.exists():
        raise UserError(f"{out_dir}: exists; choose another folder")
    with atomic_dir(out_dir) as scratch:
        (scratch / "text").mkdir()
        template = scratch / "text" / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        found = {}
        for domain, path in texts.items():
            chats = scratch / "text" / f"{domain}.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines()
            _write(chats, [chat for line in lines for chat in conversations(domain, json.loads(line)["text"])][:MOST])
            tokenizer = data / "tokenizer"
            found[domain] = prepare_data(
                [chats],
                tokenizer,
                scratch,
                domain,
                validation_fraction=0.05,
                chat=True,
                chat_template=template,
                workers=workers,
            )
        return found


def conversations(domain: str, text: str) -> Iterator[Chat]:
    """A math problem is a question, its solution the answer; elsewhere the first half is to be continued."""
    if domain == "math":
        for problem in text.split("Problem: ")[1:]:
            question, _, answer = problem.partition("\nSolution: ")
            yield from _turn(question, answer)
        return
    for paragraph in text.split("\n\n"):
        words = paragraph.strip()
        if len(words) > 80:
            cut = words.rfind(" ", 0, len(words) // 2)
            yield from _turn(f"Continue: {words[:cut]}", words[cut + 1 :])


def _turn(question: str, answer: str) -> Iterator[Chat]:
    """One question and its answer, if it has one."""
    question, answer = question.strip()[:LONGEST], answer.strip()[:LONGEST]
    if answer:
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _write(path: Path, chats: Iterable[Chat]) -> None:
    text = "".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)
    path.write_text(text, encoding="utf-8")
