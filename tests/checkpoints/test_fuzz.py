"""Damaged headers and settings, 2,000 of them: one line of an error or the truth, in little memory."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from btx_testing.mixing import SMALL
from btx_testing.models import make_model
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from btx_nemo.checkpoints.inspect import inspect_checkpoint
from btx_nemo.convert.to_megatron import import_plan
from btx_nemo.errors import UserError
from btx_nemo.families.source import open_source

NAMES = ["llama-yarn", "olmo3-yarn", "qwen2-window", "mixtral", "qwen2_moe-shared"]
LONGEST = 5.0
"""Seconds."""
FUZZ = settings(
    max_examples=120, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 10**9, 10**30]),
    st.floats(),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fuzz") / request.param, request.param, **SMALL)


def is_safe(folder: Path) -> None:
    """Opening, inspecting and planning end soon, in a UserError or not, within memory of the order of the files."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    tracemalloc.start()
    begin = time.monotonic()
    try:
        source = open_source(folder)
        inspect_checkpoint(folder)
        import_plan(source).check()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert time.monotonic() - begin < LONGEST
    assert peak < 16 * size + (8 << 20)


def with_file(path: Path, content: bytes, check: Callable[[], None]) -> None:
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        check()
    finally:
        path.write_bytes(before)


def placed(table: Any, path: list[int], value: Any) -> Any:
    """The table with the value in the place that the numbers lead to."""
    if not path or not isinstance(table, (dict, list)) or not table:
        return value
    key = list(table)[path[0] % len(table)] if isinstance(table, dict) else path[0] % len(table)
    copy = dict(table) if isinstance(table, dict) else list(table)
    copy[key] = placed(copy[key], path[1:], value)
    return copy


@FUZZ
@given(path=st.lists(st.integers(0, 200), min_size=1, max_size=3), value=VALUES)
@example(path=[0], value={"a": 1})
def test_settings_with_another_value(folder: Path, path: list[int], value: Any) -> None:
    config = folder / "config.json"
    changed = placed(json.loads(config.read_text()), path, value)
    with_file(config, json.dumps(changed).encode(), lambda: is_safe(folder))


@FUZZ
@given(path=st.lists(st.integers(0, 200), min_size=1, max_size=3), value=VALUES)
def test_a_header_with_another_value(folder: Path, path: list[int], value: Any) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(placed(json.loads(content[8 : 8 + length]), path, value)).encode()
    changed = struct.pack("<Q", len(header)) + header + content[8 + length :]
    with_file(weights, changed, lambda: is_safe(folder))


@FUZZ
@given(
    name=st.sampled_from(["config.json", "model.safetensors"]),
    at=st.integers(0, 4000),
    cut=st.integers(0, 40),
    given_bytes=st.binary(max_size=40),
)
def test_other_bytes(folder: Path, name: str, at: int, cut: int, given_bytes: bytes) -> None:
    path = folder / name
    content = path.read_bytes()
    at %= len(content)
    with_file(path, content[:at] + given_bytes + content[at + cut :], lambda: is_safe(folder))


@settings(parent=FUZZ, max_examples=40)
@given(length=st.integers(0, 2**64 - 1))
def test_any_length_of_the_header(folder: Path, length: int) -> None:
    weights = folder / "model.safetensors"
    with_file(weights, struct.pack("<Q", length) + weights.read_bytes()[8:], lambda: is_safe(folder))
