"""A part of an expression equals the same part of its value, whatever the expression; only needed bytes are read."""

from __future__ import annotations

import random

import pytest
import torch
from btx_testing.tensors import MemoryReader, info_of

from btx_nemo.errors import UserError
from btx_nemo.plan.execute import evaluate
from btx_nemo.plan.expr import (
    Bernoulli,
    Choice,
    Combine,
    Concat,
    Expr,
    Index,
    Mean,
    Normal,
    Product,
    Slice,
    Splice,
    Stack,
    Take,
    Uniform,
    bind,
    generator_for,
    infer,
    push_down,
    substitute,
    takes,
)
from btx_nemo.plan.fresh import CHUNK, chosen
from btx_nemo.plan.layout import TensorInfo, row_blocks


def naive(expr: Expr, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The value of an expression, written down from its definition."""
    if isinstance(expr, Take):
        return tensors[expr.name]
    if isinstance(expr, Slice):
        return naive(expr.of, tensors).narrow(expr.dim, expr.start, expr.stop - expr.start)
    if isinstance(expr, Index):
        return naive(expr.of, tensors)[expr.index]
    if isinstance(expr, Splice):
        result = naive(expr.of, tensors).clone()
        result.index_copy_(
            expr.dim,
            indices := chosen(0, expr.choice, result.shape[expr.dim]),
            naive(expr.other, tensors).index_select(expr.dim, indices),
        )
        return result
    parts = [naive(part, tensors) for part in expr.parts]
    if isinstance(expr, Combine):
        return sum(w * part.double() for w, part in zip(expr.weights, parts, strict=True)).to(parts[0].dtype)
    if isinstance(expr, Product):
        return torch.stack(parts).double().prod(0).to(parts[0].dtype)
    if isinstance(expr, Concat):
        return torch.cat(parts, expr.dim)
    if isinstance(expr, Stack):
        return torch.stack(parts)
    return torch.stack(parts).double().mean(0).to(parts[0].dtype)


def random_expr(rng: random.Random, tensors: dict[str, torch.Tensor], depth: int) -> Expr:
    """A random expression over random integer tensors (so that means of powers of two are exact)."""
    if depth == 0:
        name = f"t{len(tensors)}"
        shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
        tensors[name] = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(len(tensors))).float()
        return Take("s", name)
    of = random_expr(rng, tensors, depth - 1)
    shape = naive(of, tensors).shape
    kind = rng.choice(["slice", "index", "concat", "stack", "mean", "combine", "product", "splice"])
    if kind == "slice" and shape:
        dim = rng.randrange(len(shape))
        start = rng.randrange(shape[dim])
        return Slice(of, dim, start, rng.randint(start + 1, shape[dim]))
    if kind == "index" and len(shape) > 1:
        return Index(of, rng.randrange(shape[0]))
    if kind == "concat" and shape:
        return Concat((of, of, of), rng.randrange(len(shape)))
    if kind == "stack" and len(shape) < 4:
        return Stack((of, of))
    if kind == "combine":
        return Combine((of, of, of), (2.0, -0.5, 0.25))
    if kind == "product" and depth == 1:
        return Product((of, of))
    if kind == "splice" and shape:
        dim = rng.randrange(len(shape))
        choice = Choice(f"c{depth}", rng.randint(0, shape[dim]), shape[dim])
        return Splice(of, Combine((of,), (2.0,)), dim, choice)
    return Mean((of, of, of, of))


@pytest.mark.parametrize("seed", range(120))
def test_every_part_of_a_random_expression_is_that_part_of_its_value(seed: int) -> None:
    rng = random.Random(seed)
    tensors: dict[str, torch.Tensor] = {}
    expr = random_expr(rng, tensors, rng.randint(1, 4))
    reader = MemoryReader(tensors)
    expected = naive(expr, tensors)
    info = infer(expr, {"s": reader.layout()})
    assert info == info_of(expected)
    assert infer(push_down(expr, {"s": reader.layout()}), {"s": reader.layout()}) == info
    assert torch.equal(evaluate(expr, {"s": reader}, info, "x", 0), expected)
    for _ in range(5):
        box = []
        for size in info.shape:
            low = rng.randrange(size)
            box.append((low, rng.randint(low + 1, size)))
        part = evaluate(expr, {"s": reader}, info, "x", 0, tuple(box))
        assert torch.equal(part, expected[tuple(slice(low, high) for low, high in box)])


def test_a_slice_reads_only_its_own_elements() -> None:
    reader = MemoryReader({name: torch.randn(100, 10) for name in "abc"})
    expr = Slice(Concat((Take("s", "a"), Take("s", "b"), Take("s", "c"))), 0, 90, 120)
    evaluate(expr, {"s": reader}, TensorInfo((30, 10), "float32"), "x", 0)
    assert reader.elements_read == 300
    experts = Stack(tuple(Take("s", name) for name in "abc"))
    reader.elements_read = 0
    evaluate(Index(experts, 1), {"s": reader}, TensorInfo((100, 10), "float32"), "x", 0, ((0, 7), (2, 5)))
    assert reader.elements_read == 21


def test_fresh_weights_depend_on_seed_and_name_alone() -> None:
    info = TensorInfo((64, 40), "bfloat16")
    whole = evaluate(Normal(0.5), {}, info, "gate", 3)
    for box in row_blocks(info, 500):
        part = evaluate(Normal(0.5), {}, info, "gate", 3, box)
        assert torch.equal(part, whole[tuple(slice(low, high) for low, high in box)])
    assert not torch.equal(whole, evaluate(Normal(0.5), {}, info, "gate", 4))
    assert not torch.equal(whole, evaluate(Normal(0.5), {}, info, "other", 3))
    assert abs(whole.float().std() - 0.5) < 0.03
    state = torch.random.get_rng_state()
    generator_for(1, "x")
    evaluate(Normal(0.5), {}, info, "gate", 3)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator must not move"


def test_errors_name_the_tensor() -> None:
    layout = {"s": {"a": TensorInfo((2, 3), "float32"), "b": TensorInfo((2, 4), "float32")}}
    with pytest.raises(UserError, match="has no tensor 'c'"):
        infer(Take("s", "c"), layout)
    with pytest.raises(UserError, match="unknown source"):
        infer(Take("t", "a"), layout)
    with pytest.raises(UserError, match="s:b is"):
        infer(Mean((Take("s", "a"), Take("s", "b"))), layout)
    with pytest.raises(UserError, match="outside"):
        infer(Slice(Take("s", "a"), 1, 2, 4), layout)


def test_substitution_renames_only_its_source() -> None:
    expr = Mean((Take("x", "a"), Slice(Take("y", "a"), 0, 0, 1)))
    assert takes(substitute(expr, "x", {"a": Index(Take("x", "b"), 0)})) == {Take("x", "b"), Take("y", "a")}


@pytest.mark.parametrize("fresh", [Normal(0.5), Normal(0.5, cut=2.0), Uniform(0.5), Bernoulli(0.3)], ids=type)
@pytest.mark.parametrize("shape", [(7, 5, 60000), (1200, 1000), (CHUNK + 77,), (3, CHUNK + 5)], ids=str)
def test_parts_of_large_fresh_tensors_are_parts_of_the_whole(fresh: Expr, shape: tuple[int, ...]) -> None:
    """Tensors of more than one chunk, cut along every dimension, and inside of another expression."""
    info, rng = TensorInfo(shape, "float32"), random.Random(1)
    whole = evaluate(fresh, {}, info, "x", 3)
    nested = Slice(Concat((bind(fresh, "x", info), bind(fresh, "y", info))), 0, 0, shape[0])
    for _ in range(4):
        low = [rng.randrange(size) for size in shape]
        box = tuple((start, rng.randint(start + 1, min(size, start + 900))) for start, size in zip(low, shape))
        expected = whole[tuple(slice(*side) for side in box)]
        assert torch.equal(evaluate(fresh, {}, info, "x", 3, box), expected)
        assert torch.equal(evaluate(nested, {}, info, "other", 3, box), expected)


def test_the_first_chunk_is_what_one_draw_gives() -> None:
    """Documented results with small routers were drawn so."""
    expected = torch.empty(8, 64).normal_(0, 0.02, generator=generator_for(5, "gate"))
    assert torch.equal(evaluate(Normal(0.02), {}, TensorInfo((8, 64), "float32"), "gate", 5), expected)
    large = evaluate(Normal(1.0), {}, TensorInfo((CHUNK + 1000,), "float32"), "gate", 5)
    assert torch.equal(large[:CHUNK], torch.empty(CHUNK).normal_(generator=generator_for(5, "gate")))
    assert not torch.equal(large[CHUNK:], large[:1000]) and abs(large[CHUNK:].std() - 1) < 0.1


def test_a_choice_is_of_the_right_number_and_seen_alike_from_everywhere() -> None:
    choice = Choice("neurons", 30, 100)
    whole = chosen(2, choice, 100).tolist()
    assert len(set(whole)) == 30 and whole == sorted(whole) and set(whole) <= set(range(100))
    for start in (0, 17, 60):
        seen = chosen(2, Choice("neurons", 30, 100, start), 40).tolist()
        assert seen == [n - start for n in whole if start <= n < start + 40]
    assert whole != chosen(3, choice, 100).tolist() != chosen(2, Choice("others", 30, 100), 100).tolist()


def test_parts_of_different_floating_dtypes_are_held_by_the_wider() -> None:
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(3, 5), "c": torch.ones(3, 5, dtype=torch.int64)}
    reader = MemoryReader(tensors)
    both = (Take("s", "a"), Take("s", "b"))
    for expr, expected in (
        (Concat(both), torch.cat((tensors["a"].float(), tensors["b"]))),
        (Mean(both), (tensors["a"].float() + tensors["b"]) / 2),
    ):
        info = infer(expr, {"s": reader.layout()})
        assert info == info_of(expected)
        assert torch.equal(evaluate(expr, {"s": reader}, info, "x", 0), expected)
    with pytest.raises(UserError, match="must agree"):
        infer(Stack((Take("s", "a"), Take("s", "c"))), {"s": reader.layout()})
