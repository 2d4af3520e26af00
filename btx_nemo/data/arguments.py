"""The command line of `btx-nemo prepare-data`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from btx_nemo.errors import UserError

_DEMO = "build the demo's three domains and tokenizer; no inputs. With --chat: conversations of the text in its folder"


def add_prepare_data(command: Callable) -> None:
    """Adds the command."""
    sub = command("prepare-data", _run, "Text or JSONL, with a tokenizer -> Megatron's .bin and .idx.")
    sub.add_argument("inputs", nargs="*", type=Path, help="text files, JSONL files, or folders of them")
    sub.add_argument("--domain", help="name of the domain, e.g. math")
    sub.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json")
    sub.add_argument("--out", type=Path, required=True, help="data folder; domains are its subfolders")
    sub.add_argument("--text-key", default="text", help="JSONL key that holds the text (default: text)")
    sub.add_argument("--chat", action="store_true", help="JSONL of conversations; the loss is the assistant's turns")
    sub.add_argument("--chat-template", type=Path, help="file with their template (default: the tokenizer's own)")
    sub.add_argument("--messages-key", default="messages", help="JSONL key of a conversation (default: messages)")
    sub.add_argument("--validation-fraction", type=float, default=0.05, help="share held out (default: 0.05)")
    sub.add_argument("--workers", type=int, help="processes (default: one per CPU that this process may use)")
    eod = sub.add_mutually_exclusive_group()
    eod.add_argument("--eod-token", help="token that ends a document (default: the tokenizer's end of sequence)")
    eod.add_argument("--no-eod", action="store_true", help="end documents with no token")
    sub.add_argument("--overwrite", action="store_true", help="replace what is there: the domain, or with --demo OUT")
    sub.add_argument("--demo", action="store_true", help=_DEMO)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.demo and arguments.chat:
        from btx_nemo.data.demo_chats import build_demo_chats

        if len(arguments.inputs) != 1 or arguments.overwrite:
            raise UserError("--demo --chat: give the folder that prepare-data --demo made, a new --out, no --overwrite")
        build_demo_chats(arguments.inputs[0], arguments.out, workers=arguments.workers)
        return
    if arguments.demo:
        from btx_nemo.data.demo import build_demo_data

        build_demo_data(arguments.out, workers=arguments.workers, overwrite=arguments.overwrite)
        return
    missing = [name for name in ("inputs", "domain", "tokenizer") if not getattr(arguments, name)]
    if missing:
        raise UserError(f"{missing[0]}: required, unless --demo")
    if arguments.chat_template and not arguments.chat:
        raise UserError("--chat-template: is for conversations; give --chat as well")
    from btx_nemo.data.prepare import prepare_data

    prepare_data(
        arguments.inputs,
        arguments.tokenizer,
        arguments.out,
        arguments.domain,
        text_key=arguments.text_key,
        workers=arguments.workers,
        validation_fraction=arguments.validation_fraction,
        append_eod=not arguments.no_eod,
        eod_token=arguments.eod_token,
        overwrite=arguments.overwrite,
        chat=arguments.chat,
        chat_template=arguments.chat_template,
        messages_key=arguments.messages_key,
    )
