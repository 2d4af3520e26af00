"""Templates of calculus, and word problems."""

from __future__ import annotations

from random import Random

from btx_nemo.data.corpora import polynomials as poly
from btx_nemo.data.corpora.math_templates import Problem, nonzero, pick

_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jonas", "Maria", "Omar")
_THINGS = ("pencils", "apples", "books", "tickets", "stamps", "bottles", "cards", "lamps", "cups", "shirts")


def _polynomial(rng: Random, degree: int, limit: int = 9) -> list[int]:
    return [rng.randint(-limit, limit) for _ in range(degree)] + [nonzero(rng, limit)]


def derivative(rng: Random) -> Problem:
    coefficients = _polynomial(rng, rng.randint(2, 4))
    expression, answer = poly.show(coefficients), poly.show(poly.derivative(coefficients))
    lines = [
        f"the derivative of {poly.term(value, power)} is {poly.term(power * value, power - 1)}"
        for power, value in reversed(list(enumerate(coefficients)))
        if value and power
    ]
    steps = f"Use the power rule: {', '.join(lines)}. Constants vanish. Together: {answer}."
    question = pick(rng, f"Differentiate {expression}.", f"Find the derivative of f(x) = {expression}.")
    return Problem(kind="derivative", question=question, steps=steps, expression=expression, answer=answer)


def product_rule(rng: Random) -> Problem:
    power, inner, scale = rng.randint(2, 6), rng.randint(2, 9), rng.randint(1, 9)
    left = poly.term(scale, power)
    left_derived = poly.term(scale * power, power - 1)
    name, derived, sign = rng.choice((("sin", "cos", "+"), ("cos", "sin", "-"), ("exp", "exp", "+")))
    argument = f"({inner}x)"
    expression = f"{left}*{name}{argument}"
    answer = f"{left_derived}*{name}{argument} {sign} {poly.term(scale * inner, power)}*{derived}{argument}"
    right_derived = f"{'-' if sign == '-' else ''}{inner}*{derived}{argument}"
    steps = (
        f"Use the product rule (uv)' = u'v + uv' with u = {left} and v = {name}{argument}. "
        f"Then u' = {left_derived} and v' = {right_derived}."
    )
    question = pick(rng, f"Differentiate {expression}.", f"Find the derivative of f(x) = {expression}.")
    return Problem(kind="derivative", question=question, steps=steps, expression=expression, answer=answer)


def chain_rule(rng: Random) -> Problem:
    a, b, power = rng.randint(2, 9), nonzero(rng, 9), rng.randint(3, 8)
    inner = poly.show([b, a])
    expression = f"({inner})^{power}"
    answer = f"{a * power}({inner})^{power - 1}"
    steps = (
        f"Use the chain rule. The outer function u^{power} has derivative {power}u^{power - 1}; "
        f"the inner function {inner} has derivative {a}. And {power} * {a} = {power * a}."
    )
    question = pick(rng, f"Differentiate {expression}.", f"Find the derivative of f(x) = {expression}.")
    return Problem(kind="derivative", question=question, steps=steps, expression=expression, answer=answer)


def antiderivative(rng: Random) -> Problem:
    primitive = [0, *_polynomial(rng, rng.randint(1, 3), 6)]
    coefficients = poly.derivative(primitive)
    expression, answer = poly.show(coefficients), poly.show(primitive)
    lines = [
        f"the integral of {poly.term(power * value, power - 1)} is {poly.term(value, power)}"
        for power, value in reversed(list(enumerate(primitive)))
        if value
    ]
    steps = f"Raise each power by one and divide by the new power: {', '.join(lines)}. Add the constant C."
    question = pick(rng, f"Find the integral of {expression} dx.", f"Find an antiderivative of {expression}.")
    return Problem(kind="antiderivative", question=question, steps=steps, expression=expression, answer=f"{answer} + C")


def definite_integral(rng: Random) -> Problem:
    primitive = [0, *_polynomial(rng, rng.randint(1, 2), 6)]
    coefficients = poly.derivative(primitive)
    low = rng.randint(-3, 3)
    high = low + rng.randint(1, 4)
    upper, lower = poly.evaluate(primitive, high), poly.evaluate(primitive, low)
    question = f"Compute the integral of {poly.show(coefficients)} from x = {low} to x = {high}."
    steps = (
        f"An antiderivative is F(x) = {poly.show(primitive)}. F({high}) = {upper} and F({low}) = {lower}. "
        f"The difference is {upper} - ({lower}) = {upper - lower}."
    )
    expression = f"{poly.show(coefficients)} from x = {low} to x = {high}"
    return Problem(kind="definite", question=question, steps=steps, expression=expression, answer=str(upper - lower))


def shopping(rng: Random) -> Problem:
    (first, second), name = rng.sample(_THINGS, 2), rng.choice(_NAMES)
    a, b, p, q = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 25), rng.randint(2, 25)
    expression = f"{a} * {p} + {b} * {q}"
    question = f"{name} buys {a} {first} at {p} coins each and {b} {second} at {q} coins each. " + pick(
        rng, "How many coins does that cost?", "What is the total price in coins?"
    )
    steps = (
        f"The {first} cost {a} * {p} = {a * p} coins, the {second} {b} * {q} = {b * q} coins. "
        f"Together {expression} = {a * p} + {b * q} = {a * p + b * q}."
    )
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(a * p + b * q))


def travel(rng: Random) -> Problem:
    name, speed, hours, second, more = (
        rng.choice(_NAMES),
        rng.randint(30, 95),
        rng.randint(2, 6),
        rng.randint(30, 95),
        rng.randint(2, 6),
    )
    total = speed * hours + second * more
    expression = f"{speed} * {hours} + {second} * {more}"
    vehicle = rng.choice(("bus", "train", "car"))
    question = (
        f"{name} travels by {vehicle} at {speed} km per hour for {hours} hours, "
        f"then at {second} km per hour for {more} hours. How many km is the whole way?"
    )
    steps = (
        f"Distance is speed times time. The first part is {speed} * {hours} = {speed * hours} km, the second is "
        f"{second} * {more} = {second * more} km. So {expression} = {total}."
    )
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(total))


def sharing(rng: Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    friends, each, lost = rng.randint(3, 12), rng.randint(3, 25), rng.randint(2, 30)
    total = friends * each + lost
    expression = f"({total} - {lost}) / {friends}"
    question = (
        f"{name} has {total} {thing}, loses {lost} of them and shares the rest equally among {friends} friends. "
        f"How many {thing} does each friend get?"
    )
    steps = (
        f"After the loss {total} - {lost} = {total - lost} {thing} are left. "
        f"Each friend gets {expression} = {total - lost} / {friends} = {each}."
    )
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(each))


def series(rng: Random) -> Problem:
    first, step, count = rng.randint(1, 20), rng.randint(2, 9), rng.randint(5, 30)
    last = first + (count - 1) * step
    total = count * (first + last) // 2
    expression = f"{count} * ({first} + {last}) / 2"
    question = (
        f"An arithmetic sequence starts with {first}, {first + step}, {first + 2 * step}. "
        f"What is the sum of its first {count} terms?"
    )
    steps = (
        f"The step is {step}, so term {count} is {first} + {count - 1} * {step} = {last}. "
        f"The sum is {expression} = {total}."
    )
    return Problem(kind="value", question=question, steps=steps, expression=expression, answer=str(total))
