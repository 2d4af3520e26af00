"""The command line of `btx-nemo embed`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from btx_nemo.errors import UserError


def add_embed(command: Callable) -> None:
    """Adds the command."""
    sub = command("embed", _run, "Embeddings of domains, for recipe=nexus, two_expert and extend.")
    sub.add_argument("domains", nargs="+", metavar="NAME=PATH", help="a domain's folder of prepare-data, or text")
    sub.add_argument("--model", type=Path, required=True, help="the seed: Hugging Face, checkpoint or run directory")
    sub.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    sub.add_argument("--embedder", default="mean_hidden_state", help="default: %(default)s, of the seed")
    sub.add_argument("--documents", type=int, default=1000, help="of a domain, at most (default: %(default)s)")
    sub.add_argument("--tokens", type=int, default=512, help="of a document, at most (default: %(default)s)")


def _run(arguments: argparse.Namespace) -> None:
    domains: dict[str, Path] = {}
    for assignment in arguments.domains:
        name, equals, path = assignment.partition("=")
        if not equals or not path:
            raise UserError(f"{assignment}: expected NAME=PATH")
        if name in domains:
            raise UserError(f"{name} is given twice, {domains[name]} and {path}; give it once")
        domains[name] = Path(path)
    from btx_nemo.embed.run import embed_domains

    embed_domains(
        arguments.model,
        domains,
        arguments.out,
        embedder=arguments.embedder,
        count=arguments.documents,
        length=arguments.tokens,
    )
