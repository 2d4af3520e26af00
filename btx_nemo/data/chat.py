"""Conversations to token ids, and which of them are an assistant's: the tokens that fine-tuning learns to say.

A conversation is rendered by the tokenizer's own chat template. Templates seldom say which part is whose, so a turn of
the assistant is what rendering with it has beyond rendering without it, checked token by token. A template whose
shorter renderings do not begin its longer ones (one that drops earlier reasoning, say) is refused, unless it marks the
assistant's part itself, with {% generation %}.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from btx_nemo.checkpoints.files import read_regular
from btx_nemo.data.sources import check_unicode, value_of
from btx_nemo.data.tokenizer import Encoder, load_transformers
from btx_nemo.errors import UserError

MAX_TEMPLATE_BYTES = 1 << 20
ASSISTANT = "assistant"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation, encoded."""

    text: str
    """As the template renders it."""
    ids: list[int]
    targets: np.ndarray
    """uint8, one per id: 1 where the assistant speaks, the end of its turn included."""


@dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """JSON records with a list of messages, to ids and targets."""

    encoder: Encoder
    tokenizer: Any
    """A transformers tokenizer."""
    template: str
    messages_key: str

    def encode(self, record: Any) -> Conversation:
        """One record. Raises UserError, without its place, for one that is no conversation or cannot be rendered."""
        messages, tools = self._messages(record)
        if _MARKED.search(self.template):
            return self._marked(messages, tools)
        text = self._render(messages, tools)
        if messages[0]["role"] == ASSISTANT:  # transformers renders no conversation without a message
            raise UserError(
                "begins with the assistant, so that nothing is rendered before its turn; let a user or system message "
                "begin it, leave the line out, or give --chat-template FILE with {% generation %}"
            )
        spans = [
            (self._render(messages[:turn], tools, prompt=True), self._render(messages[: turn + 1], tools))
            for turn, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        ids, *parts = self.encoder.encode([text, *(part for span in spans for part in span)])
        targets = np.zeros(len(ids), dtype=np.uint8)
        for before, after in zip(parts[::2], parts[1::2], strict=True):
            if ids[: len(before)] != before or ids[: len(after)] != after or len(after) <= len(before):
                raise UserError(
                    "the chat template renders the first turns otherwise when more follow, so that it cannot be told "
                    "which tokens are the assistant's; give --chat-template FILE with {% generation %} around its part"
                )
            targets[len(before) : len(after)] = 1
        return Conversation(text=text, ids=ids, targets=targets)

    def _messages(self, record: Any) -> tuple[list[dict[str, Any]], Any]:
        messages = value_of(record, self.messages_key, "--messages-key")
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
        ):
            raise UserError(f"{self.messages_key!r} is no list of messages, each with role and content")
        for message in messages:
            if not isinstance(message.get("content", ""), str | None):
                raise UserError(f"the content of a message is {type(message['content']).__name__}, not text")
        if all(message["role"] != ASSISTANT for message in messages):
            raise UserError(f"no message of role {ASSISTANT!r}, so that there is nothing to learn; leave the line out")
        return messages, record.get("tools")

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> Conversation:
        text = self._render(messages, tools)
        rendered = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, targets = list(rendered["input_ids"]), np.array(rendered["assistant_masks"], dtype=np.uint8)
        if not targets.any():
            raise UserError("the template's {% generation %} marks nothing of it; mend the template")
        return Conversation(text=text, ids=ids, targets=targets)

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
        text = self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt)
        check_unicode(text, "a message")
        return text

    def _apply(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, chat_template=self.template, **options)
        except Exception as error:  # whatever a template may raise: jinja's errors, and Python's own within it
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"the chat template cannot render it ({reason}); mend the line, leave it out, or give another template "
                "with --chat-template FILE"
            ) from error


def load_chat_encoder(path: Path, encoder: Encoder, template: Path | None, messages_key: str) -> ChatEncoder:
    """An encoder of conversations.

    Args:
        path: folder of a Hugging Face tokenizer.
        encoder: the same tokenizer's for text.
        template: file with a Jinja chat template; default the tokenizer's own.
        messages_key: key of the messages in each JSON line.

    Raises:
        UserError: no folder, no template, or one that is not text.
    """
    if not Path(path).is_dir():
        raise UserError(f"--tokenizer {path}: chats need the tokenizer's folder, which has its chat template")
    tokenizer = load_transformers(Path(path))
    text = tokenizer.chat_template if template is None else _read_template(template)
    if isinstance(text, dict):  # several, by name
        text = text.get("default")
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"--tokenizer {path}: has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); give one with --chat-template FILE"
        )
    return ChatEncoder(encoder=encoder, tokenizer=tokenizer, template=text, messages_key=messages_key)


def _read_template(path: Path) -> str:
    if not Path(path).is_file():
        raise UserError(f"--chat-template {path}: no such file; give a file with a Jinja template")
    try:
        return read_regular(Path(path), MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--chat-template {path}: not UTF-8; give a file with a Jinja template") from error


def template_hash(template: str) -> str:
    """SHA-256 of a chat template."""
    return hashlib.sha256(template.encode()).hexdigest()
