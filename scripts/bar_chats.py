"""The demo's text as conversations, for scripts/bar.sh: OUT/<domain>.jsonl from DATA/text/<domain>/train.jsonl."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST = 700
"""Characters of an answer."""


def conversations(domain: str, text: str) -> Iterator[list[dict[str, str]]]:
    """A math problem is a question, its solution the answer; elsewhere the first half is to be continued."""
    if domain == "math":
        for problem in text.split("Problem: ")[1:]:
            question, _, answer = problem.partition("\nSolution: ")
            yield turn(question, answer)
        return
    for paragraph in text.split("\n\n"):
        words = paragraph.strip()
        if len(words) > 80:
            cut = words.rfind(" ", 0, len(words) // 2)
            yield turn(f"Continue: {words[:cut]}", words[cut + 1 :])


def turn(question: str, answer: str) -> list[dict[str, str]]:
    """One question and its answer."""
    return [
        {"role": "user", "content": question.strip()[:LONGEST]},
        {"role": "assistant", "content": answer.strip()[:LONGEST]},
    ]


def main(data: Path, out: Path, limit: int = 1500) -> None:
    """Writes at most `limit` conversations of each domain, and says how many."""
    out.mkdir(parents=True, exist_ok=True)
    for domain in ("math", "code", "prose"):
        lines = (data / "text" / domain / "train.jsonl").read_text(encoding="utf-8").splitlines()
        found = [
            chat for line in lines for chat in conversations(domain, json.loads(line)["text"]) if chat[1]["content"]
        ]
        chats = found[:limit]
        text = "".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)
        (out / f"{domain}.jsonl").write_text(text, encoding="utf-8")
        print(f"{out}/{domain}.jsonl: {len(chats)} conversations")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
