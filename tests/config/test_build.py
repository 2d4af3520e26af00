"""Dictionaries to frozen dataclasses: nothing unknown, nothing missing, nothing converted behind the user's back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from btx_nemo.config.build import build
from btx_nemo.config.schema import TrainConfig
from btx_nemo.errors import UserError


@dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    maybe: Inner | None = None
    count: int | None = None
    names: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    flag: bool = False


GOOD: dict[str, Any] = {"name": "a", "inner": {"size": 3}}


def made(**changes: Any) -> Outer:
    return build(Outer, {**GOOD, **changes}, where="file.yaml")


def test_defaults_and_nesting() -> None:
    assert made() == Outer(name="a", inner=Inner(size=3))
    assert made(maybe={"size": 1}, count=2, names=["x"], weights={"m": 1}, flag=True) == Outer(
        "a", Inner(3), Inner(1), 2, ["x"], {"m": 1.0}, True
    )


def test_whole_numbers_become_floats_and_nothing_else_changes() -> None:
    rate = made(inner={"size": 3, "rate": 1}).inner.rate
    assert (rate, type(rate)) == (1.0, float)
    assert type(made(weights={"m": 2}).weights["m"]) is float


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nome": 1}, "file.yaml: unknown key nome; known: name, inner, maybe, count, names, weights, flag"),
        ({"inner": {"size": 1, "sice": 2}}, "file.yaml: unknown key inner.sice; known: size, rate"),
        ({"inner": {}}, "file.yaml: inner.size is required; give inner.size=VALUE"),
        ({"inner": None}, "file.yaml: inner must be a mapping, not None"),
        ({"inner": 3}, "file.yaml: inner must be a mapping, not 3"),
        ({"name": 3}, "file.yaml: name must be str, not 3 (int); quote a text that looks like a number: \"'3'\""),
        ({"name": None}, "file.yaml: name must be str, not nothing (null)"),
        ({"inner": {"size": 1.0}}, "file.yaml: inner.size must be int, not 1.0 (float)"),
        ({"inner": {"size": True}}, "file.yaml: inner.size must be int, not True (bool)"),
        ({"inner": {"size": "1"}}, "file.yaml: inner.size must be int, not '1' (str)"),
        ({"inner": {"size": 1, "rate": "1e-3"}}, "file.yaml: inner.rate must be float, not '1e-3' (str)"),
        ({"inner": {"size": 1, "rate": True}}, "file.yaml: inner.rate must be float, not True (bool)"),
        ({"names": "x"}, "file.yaml: names must be list[str], not 'x' (str)"),
        (
            {"names": ["x", 1]},
            "file.yaml: names[1] must be str, not 1 (int); quote a text that looks like a number: \"'1'\"",
        ),
        ({"weights": {"m": "x"}}, "file.yaml: weights.m must be float, not 'x' (str)"),
        ({"maybe": {"size": "x"}}, "file.yaml: maybe.size must be int, not 'x' (str)"),
        ({"flag": "yes"}, "file.yaml: flag must be bool, not 'yes' (str)"),
        ({"flag": 1}, "file.yaml: flag must be bool, not 1 (int)"),
    ],
)
def test_everything_else_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as told:
        made(**changes)
    assert str(told.value) == message


def test_a_missing_key_is_told() -> None:
    with pytest.raises(UserError, match=r"name is required; give name=VALUE"):
        build(Outer, {"inner": {"size": 1}}, where="file.yaml")


def test_no_mapping_at_all() -> None:
    with pytest.raises(UserError, match="must be a mapping"):
        build(Outer, [1], where="file.yaml")


def test_every_setting_of_a_run_is_documented() -> None:
    """The schema is the reference: a docstring under each field."""
    import ast
    import inspect

    from btx_nemo.config import schema

    seen = {cls.name: cls for cls in ast.walk(ast.parse(inspect.getsource(schema))) if isinstance(cls, ast.ClassDef)}
    assert TrainConfig.__name__ in seen
    for cls in seen.values():
        for here, following in zip(cls.body, [*cls.body[1:], None]):
            if isinstance(here, ast.AnnAssign):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented, f"{cls.name}.{ast.unparse(here.target)}"


def test_a_run_cannot_be_changed_once_built() -> None:
    assert TrainConfig.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(f.kw_only for f in dataclasses.fields(TrainConfig))
