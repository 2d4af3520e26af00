"""Who may import what: the parts that are pure stay free of Megatron, transformers and training."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "btx_nemo"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
PURE = (
    *("plan/", "checkpoints/", "families/", "mix/", "config/", "errors.py", "launch/"),
    *("routers/functional.py", "routers/losses.py"),
)
"""No Megatron and no transformers at all, at whatever place."""
MEGATRON = (
    "megatron/",
    "routers/base.py",
    "convert/logits.py",
    "train/",
    "data/datasets.py",
    "data/order.py",
    "data/prepare.py",
    "doctor.py",
)
"""May import megatron.core, as may every router file of its own."""
EAGER = (
    "routers/base.py",
    "routers/",
    *(f"convert/hf_moe/{part}" for part in ("attention", "configuration", "modeling")),
)
"""May do so at module level: they are imported by name, once a model is built."""


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Modules that a file imports; TYPE_CHECKING blocks do not count."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = list(tree.body) if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def of(module: str, *, top_level_only: bool = False) -> set[str]:
    return set(imports(PACKAGE / module, top_level_only=top_level_only))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_the_scan_sees_imports() -> None:
    assert "megatron.core.transformer.moe.router" in of("routers/base.py")
    assert any(within(name, "megatron.core") for name in of("train/setup.py"))
    assert not any(within(name, "megatron.core") for name in of("train/setup.py", top_level_only=True))


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(PURE)])
def test_pure_parts_know_no_framework(module: str) -> None:
    for name in of(module):
        assert not within(name, "megatron"), name
        assert not within(name, "transformers"), name


@pytest.mark.parametrize("module", MODULES)
def test_only_some_parts_know_megatron(module: str) -> None:
    if any(within(name, "megatron") for name in of(module)):
        own_router = module.startswith("routers/") and module not in ("routers/functional.py", "routers/losses.py")
        assert module.startswith(MEGATRON) or own_router


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith(EAGER)])
def test_megatron_and_transformers_are_imported_late(module: str) -> None:
    """A user's mistake is told before seconds of imports, and Megatron is first imported in the platform's scope."""
    for name in of(module, top_level_only=True):
        assert not within(name, "megatron"), name
        assert not within(name, "transformers"), name


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    """Assembling knows no training, and only the command line, the demo and the launcher know the commands."""
    room = module.split("/")[0]
    forbidden = {
        "plan": ("mix", "convert", "train", "data", "families", "megatron", "routers", "config"),
        "checkpoints": ("mix", "convert", "train", "data", "megatron", "routers", "config"),
        "families": ("mix", "convert", "train", "data", "megatron", "routers"),
        "mix": ("train", "data", "megatron", "embed"),
        "embed": ("train", "megatron"),
        "convert": ("mix", "data"),
        "data": ("train", "mix", "convert", "megatron"),
        "config": ("train", "mix", "convert", "data", "megatron", "routers", "plan"),
        "routers": ("train", "mix", "convert", "data"),
        "megatron": ("train", "mix", "convert", "data"),
        "train": ("mix", "demo", "launch"),
    }.get(room, ())
    for name in of(module):
        for other in forbidden:
            assert not within(name, f"btx_nemo.{other}"), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_only_the_command_line_exits(module: str) -> None:
    if module in ("cli.py", "__main__.py"):
        return
    tree = ast.parse((PACKAGE / module).read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"sys.exit", "exit", "quit"}


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("megatron/platform.py", "doctor.py")])
def test_one_module_asks_what_the_device_is(module: str) -> None:
    assert "torch.cuda" not in (PACKAGE / module).read_text()
