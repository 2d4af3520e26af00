"""The router that Megatron's MoELayer calls: fp32 logits, a routing rule, losses on it, statistics.

Shape suffixes: S sequence (of this rank), B micro-batch, H hidden, T = S * B tokens, E experts.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from btx_nemo.config.build import build
from btx_nemo.config.schema import RouterConfig
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.plan.execute import TensorReader
from btx_nemo.plan.expr import Expr, Normal
from btx_nemo.routers.foreign import check_megatron
from btx_nemo.routers.losses import LOSSES, Decision, check_loss_names
from btx_nemo.routers.noise import generator_of, micro_batch_seed
from btx_nemo.routers.ranks import Places
from btx_nemo.routers.rows import FrozenRows, check_frozen_rows
from btx_nemo.routers.statistics import RoutingStatistics

Fresh = Mapping[str, tuple[tuple[int, ...], Expr | None]]
"""Key within the layer's `mlp` -> (shape, value when fresh; None where it has to be given)."""


class BaseRouter(Router):
    """Base of all routers: subclasses implement `route`, and whatever else of `Options`, `logits`, `decide`, `keep`.

    Built by Megatron's MoELayer through `MoESubmodules(router=functools.partial(Subclass, model=..., options=...))`;
    keywords that only some Megatron versions pass go on to its own base class.
    """

    @dataclass(frozen=True)
    class Options:
        """The rule's own settings (`moe.options`); each router has its own."""

    only_top_k: int | None = None
    """The one number of experts per token that the rule knows; None when `moe.top_k` chooses."""
    variable_selection = False
    """Whether tokens may go to more or fewer than top_k experts, so that the dispatcher has to count."""
    rows = True
    """Whether the router's weight has a row for each expert."""
    extra_losses: tuple[str, ...] = ()
    """Losses that need something which only this router has."""

    def __init__(
        self, config: Any, pg_collection: Any = None, *, model: ModelConfig, options: RouterConfig, **kwargs: Any
    ):
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        assert model.moe is not None
        check_megatron(config, type(self), model.moe)
        self.moe, self.options, self.settings = model.moe, options, self.options_of(model.moe)
        self.weight.data = self.weight.data.float()
        self.places = Places(self.tp_cp_group, config.context_parallel_size)
        self.losses = {name: weight for name, weight in options.losses.items() if weight}
        self.statistics = RoutingStatistics(model.moe.num_experts)
        self.loss_tokens: dict[int, Tensor] = {}
        """Seed of a micro-batch -> tokens of its training loss, for a loss per token; the training loop fills it."""
        self.frozen_rows = FrozenRows(options.frozen_rows)
        self.frozen_rows.add(self.weight, first=0)
        self.begin_step(0)

    # What a router says of itself before any is built.

    @classmethod
    def options_of(cls, moe: MoEConfig) -> Any:
        """`moe.options` as this router's `Options`. Raises UserError."""
        return build(cls.Options, moe.options, where=f"moe.router={moe.router}", path="moe.options")

    @classmethod
    def experts_per_token(cls, moe: MoEConfig) -> int:
        """Experts that a token is sent to, before any are dropped."""
        return moe.top_k

    @classmethod
    def mean_experts_per_token(cls, moe: MoEConfig, layer: int) -> float:
        """The same on average in a layer, counted from 0; for estimates."""
        return cls.experts_per_token(moe)

    @classmethod
    def check(cls, model: ModelConfig) -> None:
        """Raises UserError when the rule cannot route in this model."""
        moe = moe_of(model)
        cls.options_of(moe)
        if not 1 <= moe.top_k <= moe.num_experts:
            raise UserError(f"moe.top_k={moe.top_k}: must lie between 1 and the {moe.num_experts} experts")
        if cls.only_top_k is not None and moe.top_k != cls.only_top_k:
            raise UserError(
                f"moe.router={moe.router} sends a token to {cls.only_top_k} expert, not to moe.top_k={moe.top_k}; "
                f"give moe.top_k={cls.only_top_k}"
            )

    @classmethod
    def check_training(cls, model: ModelConfig, router: RouterConfig) -> None:
        """Raises UserError when the rule cannot be trained so."""
        known = [name for name in LOSSES if name != "load" or name in cls.extra_losses]
        check_loss_names(router.losses)
        for name, weight in router.losses.items():
            if weight and name not in known:
                raise UserError(
                    f"router.losses.{name}: moe.router={moe_of(model).router} does not have what it takes (trainable "
                    f"noise); losses for it: {', '.join(known)}"
                )
            if not 0 <= weight < math.inf:
                raise UserError(f"router.losses.{name}={weight}: must not be negative")
        check_frozen_rows(router.frozen_rows, moe_of(model), cls.rows)
        if router.frozen_rows and router.reset:
            raise UserError("router.reset=true would freeze fresh rows; give it or router.frozen_rows")
        if not 0 <= router.input_jitter < 1:
            raise UserError(f"router.input_jitter={router.input_jitter}: must lie between 0 and 1, without 1")
        if not 0 <= router.init_scale < math.inf:
            raise UserError(f"router.init_scale={router.init_scale}: must not be negative")

    @classmethod
    def tensors(cls, model: ModelConfig, router: RouterConfig) -> Fresh:
        """What a checkpoint holds for one layer's routing: parameters and buffers, beside the experts' own."""
        shape = (moe_of(model).num_experts, model.hidden_size)
        return {"router.weight": (shape, fresh_weight(model, router))}

    @classmethod
    def readers(cls, model: ModelConfig) -> dict[str, TensorReader]:
        """Sources by the names that fresh values in `tensors` take from."""
        return {}

    @classmethod
    def megatron_settings(cls, model: ModelConfig) -> dict[str, Any]:
        """Keywords for Megatron's TransformerConfig."""
        top_k = cls.experts_per_token(moe_of(model))
        settings: dict[str, Any] = {"moe_router_topk": top_k, "moe_router_pre_softmax": top_k == 1}
        if cls.variable_selection:
            # Any number makes Megatron's dispatcher count the tokens; what is dropped, the router itself decides.
            settings["moe_expert_capacity_factor"] = 1.0
        return settings

    # What a rule defines.

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """fp32 hidden states -> fp32 logits [T, E]."""
        return torch.nn.functional.linear(hidden_TH, self.weight)

    @abstractmethod
    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Gates [T, E] (zero where not selected) and the boolean selection [T, E], before any is dropped."""

    def decide(self, hidden_TH: Tensor) -> Decision:
        """The rule on fp32 hidden states."""
        logits_TE = self.logits(hidden_TH)
        gates_TE, selected_TE = self.route(logits_TE)
        return Decision(logits_TE, gates_TE, selected_TE, self.experts_per_token(self.moe))

    def keep(self, selected_TE: Tensor) -> Tensor:
        """The selection that is carried out: all of it, unless experts have a capacity."""
        return selected_TE

    def begin_step(self, step: int) -> None:
        """Called before each optimizer step with the number of steps taken."""
        self.step = step
        self.loss_tokens.clear()
        self._global_load: Tensor | None = None
        self._global_count = 0
        self.frozen_rows.remember()

    def after_step(self) -> None:
        """Called after each optimizer step; projects parameters back to where they may be."""
        self.frozen_rows.restore()

    # The frame around it.

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Routes [S, B, H] hidden states; returns fp32 gates and the selection, both [T, E].

        `padding_mask` [S, B] is true at padding, as in Megatron's own router (its docstring says the opposite).
        Padding counts in no loss, no statistic and no capacity.
        """
        self.length, self.sequences = input.shape[:2]
        valid_T = self.valid_T = None if padding_mask is None else ~padding_mask.reshape(-1).bool()
        self.tokens = self._count_tokens(self.length * self.sequences, valid_T)
        decision = self.decide(self._jittered(input).flatten(0, 1).float())
        decision = dataclasses.replace(
            decision,
            mean=lambda values_TX: self._mean(values_TX, valid_T),
            sequences=self.sequences,
        )
        selected_TE = decision.selected_TE
        kept_TE = self.keep(selected_TE if valid_T is None else selected_TE & valid_T[:, None])
        if valid_T is not None and not self.variable_selection:
            kept_TE = selected_TE  # Megatron counts on top_k experts for every token, padding or not
        gates_TE = decision.gates_TE if kept_TE is selected_TE else decision.gates_TE * kept_TE
        losses: dict[str, Tensor] = {}
        if self.training and torch.is_grad_enabled() and self.losses:
            losses = self._losses(decision)
            total = torch.stack([self.losses[name] * loss for name, loss in losses.items()]).sum()
            gates_TE = MoEAuxLossAutoScaler.apply(gates_TE, total * self._loss_scale())
        if torch.is_grad_enabled() or not self.training:  # once a micro-batch, recomputation or not
            self.statistics.add(decision.logits_TE, decision.gates_TE, selected_TE, kept_TE, valid_T, losses)
        if self.config.moe_router_padding_for_quantization:
            kept_TE = kept_TE.clone()  # the dispatcher pads it in place
        return gates_TE, kept_TE

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Megatron's name for `route`."""
        return self.route(logits)

    def _losses(self, decision: Decision) -> dict[str, Tensor]:
        if "switch_global" in self.losses:
            decision = dataclasses.replace(decision, global_load_E=self._update_global_load(decision))
        options = {"btx": {"detach_u": self.options.detach_u}}
        return {name: LOSSES[name](decision, **options.get(name, {})) for name in self.losses}

    def _loss_scale(self) -> Tensor | int:
        """What the micro-batch's losses are multiplied with, so that Megatron's own scaling leaves their mean.

        With a loss per token it divides all gradients by the step's tokens, so a micro-batch counts as its tokens do:
        those of the training loss where the training loop says them, else those that are routed.
        """
        if not self.config.calculate_per_token_loss:
            return 1
        return self.loss_tokens.get(micro_batch_seed(), self.tokens)

    @torch.no_grad()
    def _update_global_load(self, decision: Decision) -> Tensor:
        load_E = decision.mean(decision.selected_TE.float())
        ranks = self.tp_dp_cp_group.size()
        load_E = reduce_from_tensor_model_parallel_region(load_E.clone(), group=self.tp_dp_cp_group) / ranks
        self._global_load = load_E if self._global_load is None else self._global_load + load_E
        self._global_count += 1
        return self._global_load / self._global_count

    def _mean(self, values_TX: Tensor, valid_T: Tensor | None) -> Tensor:
        # Sequence parallelism leaves each rank its share of the tokens. Backward passes each rank's gradient on as it
        # is: every rank has the whole loss, and Megatron sums the router's gradient over these ranks.
        if valid_T is not None:
            values_TX = values_TX * valid_T[:, None]
        return reduce_from_tensor_model_parallel_region(values_TX.sum(dim=0), group=self.tp_cp_group) / self.tokens

    def _count_tokens(self, here: int, valid_T: Tensor | None) -> Tensor | int:
        """Valid tokens of the micro-batch, on all ranks that share it; at least one."""
        if valid_T is None:
            return here * self.tp_cp_group.size()
        return reduce_from_tensor_model_parallel_region(valid_T.sum(), group=self.tp_cp_group).clamp(min=1)

    # Noise that is the same at every layout, and the same again when activations are recomputed.

    def noise(self, width: int, draw: Callable[[Tensor, torch.Generator], Tensor], *, salt: int = 0) -> Tensor:
        """Noise [T, width] for this rank's tokens, cut from a draw for the whole micro-batch.

        `draw(empty, generator)` fills fp32 memory; `salt` tells apart what one layer draws. See `noise.py`.
        """
        group, local, device = self.tp_cp_group, self.length, next(self.parameters()).device
        generator = generator_of(device, micro_batch_seed(), int(self.layer_number or 0), salt)
        whole = draw(torch.empty(local * group.size(), self.sequences, width, device=device), generator)
        return self.places.cut(whole).flatten(0, 1)

    def _jittered(self, input: Tensor) -> Tensor:
        size = self.options.input_jitter
        if not (self.training and size):
            return input
        noise_TH = self.noise(input.shape[-1], lambda x, g: x.uniform_(1 - size, 1 + size, generator=g), salt=1)
        return input.float() * noise_TH.view(input.shape)

    # fp32 whatever the model's dtype.

    def parameter(self, *shape: int, first: int | None = None) -> torch.nn.Parameter:
        """A further fp32 parameter, undefined, whose gradient Megatron sums over ranks as it does the weight's.

        `first` is the expert of its first row, where it has a row for each expert from there.
        """
        value = torch.nn.Parameter(torch.empty(*shape, dtype=torch.float32))
        value.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        if first is not None:
            self.frozen_rows.add(value, first)
        return value

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves between devices; Float16Module's cast leaves parameters and buffers as they are."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            cast = tensor.is_floating_point() and result.dtype != tensor.dtype
            return tensor.to(result.device) if cast else result

        return super()._apply(moved, recurse)


def fresh_weight(model: ModelConfig, router: RouterConfig) -> Expr:
    """A fresh router's weights: N(0, init_std^2), or Switch's truncated normal, sqrt(s / H) cut at two deviations."""
    if router.init_scale > 0:
        return Normal(math.sqrt(router.init_scale / model.hidden_size), cut=2.0)
    return Normal(model.init_std)


def moe_of(model: ModelConfig) -> MoEConfig:
    """The mixture of a model that is one."""
    assert model.moe is not None
    return model.moe
