"""Integer polynomials as lists of coefficients (constant first), written as in a school book."""

from __future__ import annotations

from collections.abc import Sequence


def show(coefficients: Sequence[int], variable: str = "x") -> str:
    """`[7, -5, 3]` -> `3x^2 - 5x + 7`."""
    terms = []
    for power, value in reversed(list(enumerate(coefficients))):
        if value:
            terms.append(("-" if value < 0 else "+", term(abs(value), power, variable)))
    if not terms:
        return "0"
    first_sign, first = terms[0]
    return ("-" if first_sign == "-" else "") + first + "".join(f" {sign} {body}" for sign, body in terms[1:])


def term(value: int, power: int, variable: str = "x") -> str:
    """`term(3, 2)` -> `3x^2`; a coefficient of one is left out."""
    if power == 0:
        return str(value)
    body = variable if power == 1 else f"{variable}^{power}"
    return body if value == 1 else "-" + body if value == -1 else f"{value}{body}"


def multiply(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Coefficients of the product."""
    product = [0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            product[i + j] += a * b
    return product


def derivative(coefficients: Sequence[int]) -> list[int]:
    """Coefficients of the derivative."""
    return [power * value for power, value in enumerate(coefficients)][1:] or [0]


def evaluate(coefficients: Sequence[int], at: int) -> int:
    """Value at an integer."""
    return sum(value * at**power for power, value in enumerate(coefficients))


def factor(root: int) -> str:
    """`(x - root)`."""
    return f"({show([-root, 1])})"
