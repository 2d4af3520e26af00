"""Small conversations, a template for them, and data made of both."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from btx_testing.text import WORDS, byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}> {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
"""As most are: without a mark around what the assistant says."""
MARKED = TEMPLATE.replace(
    "<{{ message['role'] }}> {{ message['content'] }}{{ eos_token }}\n",
    "<{{ message['role'] }}> {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}{{ eos_token }}\n{% endif %}",
)
"""The same with the mark that transformers knows."""


def chat_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """The byte-level tokenizer with a chat template."""
    byte_tokenizer(folder)
    if template is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


def conversation(rng: Random, turns: int = 2, words: int = 3) -> list[dict[str, str]]:
    """`turns` questions and answers of one to `words` words."""
    return [
        {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(1, words)))}
        for _ in range(turns)
        for role in ("user", "assistant")
    ]


def write_chats(path: Path, chats: list[list[dict[str, str]]], **more: Any) -> Path:
    """One conversation a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": chat, **more}) + "\n" for chat in chats), encoding="utf-8")
    return path


def chat_domain(root: Path, domain: str, count: int, *, seed: int = 0, turns: int = 1, words: int = 3) -> Path:
    """A prepared domain of conversations under root/data; returns that folder."""
    from btx_nemo.data.prepare import prepare_data

    rng = Random(seed)
    chats = [conversation(rng, rng.randint(1, turns), words) for _ in range(count)]
    train = write_chats(root / "text" / f"{domain}.jsonl", chats)
    valid = write_chats(root / "text" / f"{domain}-valid.jsonl", chats[: max(4, count // 10)])
    tokenizer = chat_tokenizer(root / "chat-tokenizer")
    prepare_data([train], tokenizer, root / "data", domain, workers=1, validation_inputs=[valid], chat=True)
    return root / "data"


def packed_batch(data: Path, domain: str, seq_length: int) -> dict[str, Any]:
    """All of a domain's conversations as one global batch."""
    import numpy as np

    from btx_nemo.data.indexed import open_indexed
    from btx_nemo.data.packing import PackedChats, pack
    from btx_nemo.data.sampler import collate

    prefix = data / domain / "train"
    lengths = open_indexed(prefix).lengths
    chats = PackedChats(
        prefix, data / domain / "train.targets", pack(lengths, np.arange(len(lengths)), seq_length), seq_length
    )
    return collate([chats[index] for index in range(len(chats))])
