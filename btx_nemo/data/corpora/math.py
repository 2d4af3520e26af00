"""Domain `math`: worked problems with exact answers, grouped into worksheets, and their check by sympy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from btx_nemo.data.corpora import math_calculus as calculus
from btx_nemo.data.corpora import math_templates as basic
from btx_nemo.data.corpora.math_templates import Problem, Template

TEMPLATES: tuple[Template, ...] = (
    basic.arithmetic,
    basic.division,
    basic.fractions,
    basic.linear_equation,
    basic.linear_both_sides,
    basic.quadratic,
    basic.factoring,
    basic.expanding,
    basic.greatest_divisor,
    basic.prime_factors,
    basic.to_base,
    basic.from_base,
    calculus.derivative,
    calculus.product_rule,
    calculus.chain_rule,
    calculus.antiderivative,
    calculus.definite_integral,
    calculus.shopping,
    calculus.travel,
    calculus.sharing,
    calculus.series,
)
_PER_SHEET = 8


def problems(seed: int = 0) -> Iterator[Problem]:
    """Endless problems, every template in turn, none twice, not even in other words."""
    seen: set[str] = set()
    number = 0
    while True:
        problem = TEMPLATES[number % len(TEMPLATES)](Random(f"{seed}/{number}"))
        number += 1
        if problem.key not in seen:
            seen.add(problem.key)
            yield problem


def worksheets(chosen: Sequence[Problem]) -> Iterator[str]:
    """Documents of a few problems each."""
    for start in range(0, len(chosen), _PER_SHEET):
        yield "\n".join(problem.text for problem in chosen[start : start + _PER_SHEET])


def verify(problem: Problem) -> bool:
    """Whether sympy, reading the text of the problem, agrees with its answer."""
    import sympy

    x = sympy.Symbol("x")
    expression, answer = problem.expression, problem.answer
    if expression not in problem.question + problem.steps:
        return False
    if problem.kind in ("value", "equal"):
        return sympy.expand(_parse(expression) - _parse(answer)) == 0
    if problem.kind == "solve":
        left, right = expression.split(" = ")
        name = answer.split(" = ")[0]
        found = sympy.solve(_parse(left) - _parse(right), sympy.Symbol(name))
        stated = [_parse(part.split(" = ")[1]) for part in answer.split(" or ")]
        return sorted(found) == stated
    if problem.kind == "derivative":
        return sympy.simplify(sympy.diff(_parse(expression), x) - _parse(answer)) == 0
    if problem.kind == "antiderivative":
        return sympy.expand(sympy.diff(_parse(answer.removesuffix(" + C")), x) - _parse(expression)) == 0
    if problem.kind == "definite":
        body, low, high = re.split(r" from x = | to x = ", expression)
        return sympy.integrate(_parse(body), (x, _parse(low), _parse(high))) == _parse(answer)
    if problem.kind == "primes":
        factors = sympy.factorint(int(expression))
        return answer == " * ".join(str(p) if n == 1 else f"{p}^{n}" for p, n in sorted(factors.items()))
    if problem.kind == "base":
        number, base = expression.split(" in base ")
        return int(answer, int(base)) == int(number)
    raise ValueError(f"unknown kind {problem.kind!r}")


def _parse(text: str) -> Any:
    from sympy.parsing import sympy_parser

    rules = (
        *sympy_parser.standard_transformations,
        sympy_parser.convert_xor,
        sympy_parser.implicit_multiplication,
    )
    return sympy_parser.parse_expr(text, transformations=rules)
