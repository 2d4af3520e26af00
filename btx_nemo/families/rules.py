"""Layout rules of family tables: how Hugging Face tensors become one Megatron tensor, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from btx_nemo.families.config import ModelConfig
from btx_nemo.plan.expr import Concat, Expr, Index, Slice, Stack


class Rule(Protocol):
    """Joins the Hugging Face tensors of a row into one, and splits it again; the two are inverse."""

    def join(self, parts: list[Expr], config: ModelConfig) -> Expr:
        """Hugging Face tensors -> the Megatron tensor."""

    def split(self, whole: Expr, config: ModelConfig) -> list[Expr]:
        """The Megatron tensor -> the Hugging Face tensors."""


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def join(self, parts: list[Expr], config: ModelConfig) -> Expr:
        """The tensor itself."""
        return parts[0]

    def split(self, whole: Expr, config: ModelConfig) -> list[Expr]:
        """The tensor itself."""
        return [whole]


@dataclass(frozen=True)
class GateUp:
    """linear_fc1 [2F, H]: the gate's rows, then the up projection's."""

    width: Callable[[ModelConfig], int] = lambda config: config.ffn_hidden_size
    """F of this block."""

    def join(self, parts: list[Expr], config: ModelConfig) -> Expr:
        """[gate; up]."""
        return Concat(tuple(parts), 0)

    def split(self, whole: Expr, config: ModelConfig) -> list[Expr]:
        """Its two halves."""
        width = self.width(config)
        return [Slice(whole, 0, 0, width), Slice(whole, 0, width, 2 * width)]


@dataclass(frozen=True)
class GroupedQKV:
    """linear_qkv [(groups (heads/groups + 2)) head_dim, H]: per group its query heads, then its key, then its value."""

    def join(self, parts: list[Expr], config: ModelConfig) -> Expr:
        """q, k, v -> interleaved by group."""
        q, k, v = parts
        size, per = config.head_dim, config.num_attention_heads // config.num_query_groups
        pieces: list[Expr] = []
        for group in range(config.num_query_groups):
            pieces.append(Slice(q, 0, group * per * size, (group + 1) * per * size))
            pieces += [Slice(kv, 0, group * size, (group + 1) * size) for kv in (k, v)]
        return Concat(tuple(pieces), 0)

    def split(self, whole: Expr, config: ModelConfig) -> list[Expr]:
        """Interleaved by group -> q, k, v."""
        size, per = config.head_dim, config.num_attention_heads // config.num_query_groups
        pieces: tuple[list[Expr], list[Expr], list[Expr]] = ([], [], [])
        for group in range(config.num_query_groups):
            start = group * (per + 2) * size
            for kind, (low, high) in enumerate(((0, per), (per, per + 1), (per + 1, per + 2))):
                pieces[kind].append(Slice(whole, 0, start + low * size, start + high * size))
        return [kind[0] if len(kind) == 1 else Concat(tuple(kind), 0) for kind in pieces]


@dataclass(frozen=True)
class PerExpert:
    """[N, ...]: one entry per expert, each made by another rule. The parts come expert by expert."""

    rule: Rule

    def join(self, parts: list[Expr], config: ModelConfig) -> Expr:
        """Stack the experts."""
        count = _experts(config)
        per = len(parts) // count
        return Stack(tuple(self.rule.join(parts[e * per : (e + 1) * per], config) for e in range(count)))

    def split(self, whole: Expr, config: ModelConfig) -> list[Expr]:
        """Take the experts one by one."""
        return [part for e in range(_experts(config)) for part in self.rule.split(Index(whole, e), config)]


def _experts(config: ModelConfig) -> int:
    assert config.moe is not None, "a rule for experts is used on a dense model"
    return config.moe.num_experts
