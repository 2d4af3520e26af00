"""How the architectures of Hugging Face that are mixtures say so in config.json, and which routing rules they know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from btx_nemo.errors import UserError
from btx_nemo.families.architecture import is_renormalised_top_k
from btx_nemo.families.config import ModelConfig, MoEConfig
from btx_nemo.families.router_state import router_state
from btx_nemo.families.settings import flag, natural

SHARE_OF_ALL = {"softmax": "before", "renormalise": False}
"""Options of the router `top_k` whose gates are shares of the full softmax."""


@dataclass(frozen=True, kw_only=True)
class MixtureForm:
    """One way to be a mixture."""

    num_experts: int
    """The number of experts where config.json is silent."""
    top_k: int
    """The experts per token where config.json is silent."""
    renormalises: bool | None = None
    """Whether the k gates are made to sum to one; None: as `norm_topk_prob` says."""
    dense_layers: bool = False
    """Whether `mlp_only_layers` and `decoder_sparse_step` may leave layers dense, and experts have their own width."""
    shared_expert: int | None = None
    """Width of the sigmoid-gated shared expert where config.json is silent; None: there is never one."""

    def read(self, config: Mapping[str, Any], where: str, layers: int) -> MoEConfig:
        """config.json -> MoEConfig. Raises UserError."""
        counts = [config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None]
        if len(counts) == 2 and counts[0] != counts[1]:
            raise UserError(f"{where}: num_experts={counts[0]} but num_local_experts={counts[1]}; make them agree")
        count = natural({"num_experts": counts[0] if counts else None}, "num_experts", where, self.num_experts)
        names = config.get("btx_experts")
        renormalises = self.renormalises
        if renormalises is None:
            renormalises = flag(config, "norm_topk_prob", where)
        shared = 0
        if self.shared_expert is not None:
            shared = _width(config, "shared_expert_intermediate_size", where, self.shared_expert)
        mixtures = self._read_layers(config, where, layers)
        return MoEConfig(
            num_experts=count,
            top_k=natural(config, "num_experts_per_tok", where, self.top_k),
            options={} if renormalises else dict(SHARE_OF_ALL),
            shared_expert_intermediate_size=shared or None,
            shared_expert_gate=shared > 0,
            experts=[str(name) for name in names] if isinstance(names, list) and len(names) == count else [],
            layers=mixtures,
            dense_ffn_hidden_size=natural(config, "intermediate_size", where) if mixtures is not None else None,
        )

    def _read_layers(self, config: Mapping[str, Any], where: str, layers: int) -> list[int] | None:
        if not self.dense_layers:
            return None
        dense, step = config.get("mlp_only_layers") or [], natural(config, "decoder_sparse_step", where, 1)
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise UserError(f"{where}: mlp_only_layers={dense!r} must be a list of layers")
        every = range(min(layers, 4096))  # no model has more; `check_sizes` says so
        mixtures = [layer for layer in every if layer not in dense and (layer + 1) % step == 0]
        if not mixtures:
            raise UserError(f"{where}: mlp_only_layers and decoder_sparse_step leave no layer with experts")
        return mixtures if len(mixtures) < len(every) else None

    def write(self, model: ModelConfig, base: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for config.json; `base` gives those of the training loss, if it has them."""
        moe = model.moe
        assert moe is not None
        result: dict[str, Any] = {
            "num_local_experts": moe.num_experts,
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts if moe.router == "soft" else moe.top_k,
            "output_router_logits": bool(base.get("output_router_logits", False)),
            "router_aux_loss_coef": base.get("router_aux_loss_coef", 0.001),
        }
        if self.renormalises is None:
            result["norm_topk_prob"] = gates_sum_to_one(moe)
        if self.dense_layers:
            dense = [layer for layer in range(model.num_layers) if not model.is_mixture(layer)]
            result |= {
                "mlp_only_layers": dense,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": model.ffn_hidden_size,
                "intermediate_size": moe.dense_ffn_hidden_size or model.ffn_hidden_size,
            }
        if self.shared_expert is not None:
            result["shared_expert_intermediate_size"] = moe.shared_expert_intermediate_size or 0
        if moe.experts:
            result["btx_experts"] = list(moe.experts)
        return result

    def lacks(self, model: ModelConfig) -> str | None:
        """What of the mixture's tensors has no place in this form; None when all have one."""
        moe = model.moe
        assert moe is not None
        if moe.layers is not None and not self.dense_layers:
            return "dense layers between its mixtures"
        if not self.dense_layers and moe.dense_ffn_hidden_size not in (None, model.ffn_hidden_size):
            return f"dense_ffn_hidden_size={moe.dense_ffn_hidden_size}"
        if moe.shared_expert_intermediate_size:
            if self.shared_expert is None:
                return "a shared expert"
            if not moe.shared_expert_gate:
                return "a shared expert without a sigmoid gate"
        beyond = sorted(set(router_state(model)) ^ {"weight"})
        if beyond:
            folded = ", a bias on logits that no weight can hold: no input is always one" if "penalty" in beyond else ""
            return f"a router ({moe.router}) with {', '.join(beyond)}{folded}"
        return None

    def cannot_route(self, moe: MoEConfig) -> str | None:
        """Why the form's routing is not the mixture's rule; None when it is."""
        rule = f"moe.router={moe.router}" + (f" with {moe.options}" if moe.options else "")
        if moe.router == "switch" and moe.options.get("capacity_factor", 1.5):
            return f"{rule}: it drops no token over a capacity (which moe.options.capacity_factor=0 turns off)"
        if moe.router not in ("top_k", "soft", "switch"):
            return f"{rule}: it has no such rule"
        if self.renormalises and not gates_sum_to_one(moe):
            return f"{rule}: its gates sum to one"
        return None


def gates_sum_to_one(moe: MoEConfig) -> bool:
    """Whether a token's gates sum to one: soft's do, Switch's do not, those of `top_k` as its options say."""
    return moe.router == "soft" or is_renormalised_top_k(moe)


def _width(config: Mapping[str, Any], key: str, where: str, default: int) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise UserError(f"{where}: {key}={value!r} must be a whole number, 0 for none")
    return value
