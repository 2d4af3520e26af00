"""Templates of worked problems: each draws its numbers from the generator it is given, and its answer is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from btx_nemo.data.corpora import polynomials as poly


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question, the way to the answer, and what is needed to check it."""

    kind: str
    """What `answer` is of `expression`: see `math_check.verify`."""
    question: str
    steps: str
    expression: str
    """Stands literally in the question or in the steps."""
    answer: str

    @property
    def key(self) -> str:
        """Equal for two problems that differ in their wording alone."""
        return f"{self.kind}/{self.expression}"

    @property
    def text(self) -> str:
        """As it stands in the corpus."""
        return f"Problem: {self.question}\nSolution: {self.steps}\nAnswer: {self.answer}\n"


def pick(rng: Random, *choices: str) -> str:
    """One of several phrasings."""
    return rng.choice(choices)


def nonzero(rng: Random, limit: int) -> int:
    """An integer between -limit and limit, not zero."""
    return rng.choice((-1, 1)) * rng.randint(1, limit)


def arithmetic(rng: Random) -> Problem:
    a, b, c = rng.randint(12, 99), rng.randint(12, 99), rng.randint(10, 999)
    sign = rng.choice("+-")
    product, tens, ones = a * b, b // 10 * 10, b % 10
    result = product + c if sign == "+" else product - c
    expression = f"{a} * {b} {sign} {c}"
    steps = (
        f"First multiply. {a} * {tens} = {a * tens} and {a} * {ones} = {a * ones}, "
        f"so {a} * {b} = {a * tens} + {a * ones} = {product}. Then {product} {sign} {c} = {result}."
    )
    question = pick(rng, f"Compute {expression}.", f"What is {expression}?", f"Evaluate {expression}.")
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(result))


def division(rng: Random) -> Problem:
    divisor, quotient = rng.randint(3, 49), rng.randint(11, 199)
    rest = rng.randrange(divisor)
    number = divisor * quotient + rest
    question = pick(
        rng, f"Find the remainder when {number} is divided by {divisor}.", f"What is {number} mod {divisor}?"
    )
    steps = (
        f"{divisor} goes into {number} {quotient} times, because {divisor} * {quotient} = {divisor * quotient}. "
        f"The remainder is {number} - {divisor * quotient} = {rest}."
    )
    expression = f"{number} - {divisor * quotient}"
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(rest))


def fractions(rng: Random) -> Problem:
    first, second = (Fraction(rng.randint(1, 11), rng.randint(2, 12)) for _ in range(2))
    sign = rng.choice("+-")
    common = math.lcm(first.denominator, second.denominator)
    a, b = first.numerator * (common // first.denominator), second.numerator * (common // second.denominator)
    total = a + b if sign == "+" else a - b
    result = Fraction(total, common)
    expression = f"{first} {sign} {second}"
    reduced = "" if str(result) == f"{total}/{common}" else f" = {result}"
    steps = (
        f"The common denominator is {common}. {first} = {a}/{common} and {second} = {b}/{common}. "
        f"So {expression} = {total}/{common}{reduced}."
    )
    question = pick(rng, f"Compute {expression}.", f"Write {expression} as a single fraction.")
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(result))


def linear_equation(rng: Random) -> Problem:
    a, b, x = nonzero(rng, 12), nonzero(rng, 40), nonzero(rng, 15)
    while abs(a) == 1:
        a = nonzero(rng, 12)
    right = a * x + b
    name = rng.choice("xxxynt")
    left = poly.show([b, a], name)
    expression = f"{left} = {right}"
    move = f"Subtract {b} from" if b > 0 else f"Add {-b} to"
    steps = (
        f"{move} both sides: {poly.show([0, a], name)} = {right - b}. "
        f"Divide both sides by {a}: {name} = {right - b}/{a} = {x}."
    )
    question = pick(rng, f"Solve {expression} for {name}.", f"Find {name} if {expression}.")
    return Problem(kind="solve", question=question, steps=steps, expression=expression, answer=f"{name} = {x}")


def linear_both_sides(rng: Random) -> Problem:
    a, c, x = rng.randint(2, 12), rng.randint(-9, 9), nonzero(rng, 12)
    while c in (a, 0):
        c = rng.randint(-9, 9)
    b = nonzero(rng, 20)
    d = (a - c) * x + b
    expression = f"{poly.show([b, a])} = {poly.show([d, c])}"
    steps = (
        f"Collect the terms in x on the left: {poly.show([0, a - c])} = {d - b}. "
        f"Divide by {a - c}: x = {x}. Check: {a} * ({x}) + ({b}) = {a * x + b} and {c} * ({x}) + ({d}) = {c * x + d}."
    )
    question = pick(rng, f"Solve {expression}.", f"For which x is {expression}?")
    return Problem(kind="solve", question=question, steps=steps, expression=expression, answer=f"x = {x}")


def quadratic(rng: Random) -> Problem:
    p, q = sorted((nonzero(rng, 12), nonzero(rng, 12)))
    coefficients = poly.multiply([-p, 1], [-q, 1])
    expression = f"{poly.show(coefficients)} = 0"
    factored = f"{poly.factor(p)}^2" if p == q else f"{poly.factor(p)}{poly.factor(q)}"
    steps = (
        f"Two numbers with sum {p + q} and product {p * q} are {p} and {q}. So the equation is {factored} = 0, "
        f"and a factor must be zero."
    )
    if rng.random() < 0.4:
        disc = (p + q) ** 2 - 4 * p * q
        steps = (
            f"The discriminant is ({coefficients[1]})^2 - 4 * ({p * q}) = {disc}, and its square root is {q - p}. "
            f"So x = ({p + q} - {q - p})/2 = {p} or x = ({p + q} + {q - p})/2 = {q}."
        )
    answer = f"x = {p}" if p == q else f"x = {p} or x = {q}"
    question = pick(rng, f"Solve {expression}.", f"Find all solutions of {expression}.")
    return Problem(kind="solve", question=question, steps=steps, expression=expression, answer=answer)


def factoring(rng: Random) -> Problem:
    p, q = nonzero(rng, 12), nonzero(rng, 12)
    while p == q:
        q = nonzero(rng, 12)
    expression = poly.show(poly.multiply([-p, 1], [-q, 1]))
    answer = f"{poly.factor(p)}{poly.factor(q)}"
    steps = (
        f"Look for two numbers with product {p * q} and sum {-p - q}. They are {-p} and {-q}, "
        f"because {-p} * ({-q}) = {p * q} and {-p} + ({-q}) = {-p - q}."
    )
    question = pick(rng, f"Factor {expression}.", f"Write {expression} as a product of two factors.")
    return Problem(kind="equal", question=question, steps=steps, expression=expression, answer=answer)


def expanding(rng: Random) -> Problem:
    a, b, c, d = rng.randint(1, 6), nonzero(rng, 9), rng.randint(1, 6), nonzero(rng, 9)
    expression = f"({poly.show([b, a])})({poly.show([d, c])})"
    answer = poly.show(poly.multiply([b, a], [d, c]))
    steps = (
        f"Multiply term by term: {poly.show([0, 0, a * c])} from the first terms, {poly.show([0, a * d])} and "
        f"{poly.show([0, b * c])} from the mixed terms, {b * d} from the last. Adding up gives {answer}."
    )
    question = pick(rng, f"Expand {expression}.", f"Multiply out {expression}.")
    return Problem(kind="equal", question=question, steps=steps, expression=expression, answer=answer)


def greatest_divisor(rng: Random) -> Problem:
    shared = rng.randint(2, 24)
    a, b = sorted((shared * rng.randint(3, 30), shared * rng.randint(3, 30)), reverse=True)
    lines, u, v = [], a, b
    while v:
        lines.append(f"{u} = {u // v} * {v} + {u % v}")
        u, v = v, u % v
    expression = f"gcd({a}, {b})"
    question = pick(rng, f"Find {expression}.", f"What is the greatest common divisor {expression}?")
    steps = f"By Euclid's algorithm: {'; '.join(lines)}. The last divisor is {u}."
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(u))


def prime_factors(rng: Random) -> Problem:
    number = math.prod(rng.choices((2, 2, 2, 3, 3, 5, 7, 11, 13), k=rng.randint(3, 6)))
    powers: dict[int, int] = {}
    rest, divisor, lines = number, 2, []
    while rest > 1:
        while rest % divisor:
            divisor += 1
        lines.append(f"{rest} / {divisor} = {rest // divisor}")
        powers[divisor] = powers.get(divisor, 0) + 1
        rest //= divisor
    answer = " * ".join(str(prime) if power == 1 else f"{prime}^{power}" for prime, power in powers.items())
    question = pick(rng, f"Write {number} as a product of primes.", f"Find the prime factorization of {number}.")
    steps = f"Divide by the smallest prime again and again: {', '.join(lines)}."
    return Problem(kind="primes", question=question, steps=steps, expression=str(number), answer=answer)


def to_base(rng: Random) -> Problem:
    base, number = rng.choice((2, 2, 3, 5, 7, 8)), rng.randint(20, 600)
    rest, digits, lines = number, "", []
    while rest:
        lines.append(f"{rest} = {rest // base} * {base} + {rest % base}")
        digits = str(rest % base) + digits
        rest //= base
    question = pick(rng, f"Write {number} in base {base}.", f"How is {number} in base {base} written?")
    steps = f"Divide by {base} repeatedly: {'; '.join(lines)}. Read the remainders from last to first."
    return Problem(kind="base", question=question, steps=steps, expression=f"{number} in base {base}", answer=digits)


def from_base(rng: Random) -> Problem:
    base = rng.choice((2, 2, 3, 5, 8))
    digits = [rng.randint(1, base - 1)] + [rng.randrange(base) for _ in range(rng.randint(3, 6))]
    powers = range(len(digits) - 1, -1, -1)
    expression = " + ".join(f"{digit} * {base}^{power}" for digit, power in zip(digits, powers) if digit)
    value = sum(digit * base**power for digit, power in zip(digits, powers))
    written = "".join(map(str, digits))
    parts = " + ".join(str(digit * base**power) for digit, power in zip(digits, powers) if digit)
    question = pick(
        rng, f"The number {written} is in base {base}. Write it in decimal.", f"Convert {written} from base {base}."
    )
    steps = f"Add the place values: {expression} = {parts} = {value}."
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(value))


Template = Callable[[Random], Problem]
