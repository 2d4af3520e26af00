"""Conversations: the loss is what the assistant says, and nothing is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from btx_testing.chats import MARKED, TEMPLATE, chat_tokenizer, conversation, write_chats

from btx_nemo.data.blend import check_data, load_meta
from btx_nemo.data.indexed import open_indexed
from btx_nemo.data.prepare import prepare_data
from btx_nemo.data.tokenizer import load_encoder
from btx_nemo.errors import UserError

HEADED = "{{ '<assistant> ' }}"
NEWEST_ONLY = (  # as templates that drop the reasoning of earlier turns
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] if loop.last else m['content'][:2] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def prepare(tmp_path: Path, chats: list[Any], *, template: str | None = TEMPLATE, **options: Any) -> dict[str, Any]:
    source = write_chats(tmp_path / "in.jsonl", chats)
    valid = write_chats(tmp_path / "valid.jsonl", [conversation(Random(99))])
    arguments = {"workers": 1, "chat": True, "validation_inputs": [valid], **options}
    return prepare_data([source], chat_tokenizer(tmp_path / "tok", template), tmp_path / "out", "d", **arguments)


def spoken(tmp_path: Path, number: int) -> tuple[str, str]:
    """(whole text, text of the targets) of a conversation, special tokens left out."""
    encoder = load_encoder(tmp_path / "tok")
    ids = open_indexed(tmp_path / "out/d/train").document(number)
    targets = open_indexed(tmp_path / "out/d/train.targets").document(number).astype(bool)
    return encoder.decode(ids.tolist()), encoder.decode(ids[targets].tolist())


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by difference", "marked"])
def test_the_targets_are_what_the_assistant_says_with_the_end_of_its_turn(tmp_path: Path, template: str) -> None:
    chats = [conversation(Random(number), turns=1 + number % 3) for number in range(12)]
    meta = prepare(tmp_path, chats, template=template)
    for number, chat in enumerate(chats):
        text, said = spoken(tmp_path, number)
        assert text == "".join(f"<{m['role']}> {m['content']}\n" for m in chat)
        assert said == "".join(m["content"] + "\n" for m in chat if m["role"] == "assistant")
    ids = np.concatenate(list(open_indexed(tmp_path / "out/d/train").documents()))
    targets = np.concatenate(list(open_indexed(tmp_path / "out/d/train.targets").documents()))
    answers = sum(len(chat) // 2 for chat in chats)
    assert (ids[targets == 1] == 0).sum() == answers, "the token that ends a turn is learnt"
    assert meta["kind"] == "chat" and meta["train"]["targets"] == targets.sum() and meta["append_eod"] is False
    check_data(tmp_path / "out", ["d"], 257)


def test_transformers_own_mask_is_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    chats = [conversation(Random(number), turns=2) for number in range(6)]
    prepare(tmp_path, chats)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tok")
    for number, chat in enumerate(chats):
        rendered = tokenizer.apply_chat_template(
            chat, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert open_indexed(tmp_path / "out/d/train").document(number).tolist() == list(rendered["input_ids"])
        targets = open_indexed(tmp_path / "out/d/train.targets").document(number)
        assert targets.tolist() == list(rendered["assistant_masks"])


def test_workers_change_nothing_and_equal_conversations_stay_in_one_split(tmp_path: Path) -> None:
    chats = [conversation(Random(number % 30)) for number in range(90)]
    source, tokenizer = write_chats(tmp_path / "in.jsonl", chats), chat_tokenizer(tmp_path / "tok")
    for workers in (1, 2):
        prepare_data([source], tokenizer, tmp_path / "out", f"w{workers}", workers=workers, chat=True,
                     validation_fraction=0.3)  # fmt: skip
    for name in ("train.bin", "train.idx", "train.targets.bin", "train.targets.idx", "valid.targets.bin"):
        assert (tmp_path / "out/w1" / name).read_bytes() == (tmp_path / "out/w2" / name).read_bytes()
    splits = [{ids.tobytes() for ids in open_indexed(tmp_path / "out/w1" / s).documents()} for s in ("train", "valid")]
    assert splits[0] and splits[1] and not splits[0] & splits[1]


def test_a_template_from_a_file_and_what_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(
        "{{ tools | length if tools else 0 }}{% for m in messages %}[{{ m.role }}]{{ m.content or m.tool_calls }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": "f(1)"},
            {"role": "tool", "content": "1"}, {"role": "assistant", "content": "b"}]  # fmt: skip
    source = write_chats(tmp_path / "in.jsonl", [chat], tools=[{"type": "function", "function": {"name": "f"}}])
    valid = write_chats(tmp_path / "valid.jsonl", [conversation(Random(1))])
    prepare_data(
        [source], chat_tokenizer(tmp_path / "tok", None), tmp_path / "out", "d", workers=1, chat=True,
        validation_inputs=[valid], chat_template=tmp_path / "own.jinja",
    )  # fmt: skip
    assert spoken(tmp_path, 0) == ("1[user]a[assistant]f(1)[tool]1[assistant]b", "f(1)b")


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([[{"role": "user", "content": "a"}]], {}, "in.jsonl:1: no message of role 'assistant'"),
    ([[{"role": "assistant", "content": 3}]], {}, "in.jsonl:1: the content of a message is int"),
    ([[{"content": "a"}]], {}, "in.jsonl:1: 'messages' is no list of messages"),
    ([conversation(Random(0)), "text"], {}, "in.jsonl:2: 'messages' is no list of messages"),
    ([conversation(Random(0))], {"messages_key": "turns"}, "in.jsonl:1: no key 'turns' .found: messages"),
    ([conversation(Random(0))], {"template": None}, "has no chat template .* give one with --chat-template FILE"),
    ([conversation(Random(0), turns=2)], {"template": NEWEST_ONLY}, "in.jsonl:1: the chat template renders the first"),
    ([conversation(Random(0))], {"template": "{{ nothing.at.all }}"}, "in.jsonl:1: the chat template cannot render"),
    ([conversation(Random(0))], {"template": "{% for %}"}, "in.jsonl:1: the chat template cannot render"),
    ([conversation(Random(0))], {"chat_template": Path("none")}, "--chat-template none: no such file"),
    ([[{"role": "assistant", "content": "\ud800"}]], {}, "lone surrogate"),
    ([[{"role": "assistant", "content": "a"}]], {}, "in.jsonl:1: begins with the assistant, .* leave the line out"),
    (
        [conversation(Random(0)), conversation(Random(0))[1:]],
        {"template": "{% if messages[0].role != 'user' %}{{ raise_exception('user\nfirst') }}{% endif %}" + TEMPLATE},
        "in.jsonl:2: the chat template cannot render it .user first.; mend the line, leave it out, or give another",
    ),
]


@pytest.mark.parametrize(("chats", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_told_is_refused(tmp_path: Path, chats: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepare(tmp_path, chats, **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "out/d").exists()


def test_text_is_not_taken_for_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"a.txt: conversations are lines of JSON"):
        prepare_data([tmp_path / "a.txt"], chat_tokenizer(tmp_path / "tok"), tmp_path / "out", "d", chat=True)
    with pytest.raises(UserError, match="chats need the tokenizer's folder"):
        source = write_chats(tmp_path / "in.jsonl", [conversation(Random(0))])
        prepare_data([source], tmp_path / "tok/tokenizer.json", tmp_path / "out", "d", chat=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "train.targets.idx: missing"),
        ("short", "train.targets.bin: "),
        ("value", "token id 2 is outside the vocabulary of 2"),
        ("lengths", "train.targets.idx: is not that of train.idx"),
    ],
)
def test_targets_that_are_not_those_of_the_tokens_are_found_before_training(
    tmp_path: Path, damage: str, message: str
) -> None:
    prepare(tmp_path, [conversation(Random(number)) for number in range(8)])
    path = tmp_path / "out/d/train.targets.bin"
    if damage == "missing":
        path.with_suffix(".idx").unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "value":
        path.write_bytes(b"\2" + path.read_bytes()[1:])
    else:
        for suffix in (".bin", ".idx"):
            path.with_suffix(suffix).write_bytes((tmp_path / f"out/d/valid.targets{suffix}").read_bytes())
    with pytest.raises(UserError, match=message):
        check_data(tmp_path / "out", ["d"], 257)


def test_older_data_is_text_and_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path, [conversation(Random(0))])
    path = tmp_path / "out/d/meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "kind": "images"}))
    with pytest.raises(UserError, match="kind is 'images'"):
        load_meta(tmp_path / "out", "d")
    del meta["kind"]
    path.write_text(json.dumps(meta))
    assert load_meta(tmp_path / "out", "d")["kind"] == "text"
