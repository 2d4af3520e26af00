"""Where a model's weights come from: a Hugging Face folder, one of our checkpoints, or a fresh start."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from btx_nemo.config.schema import SAME_RESULT, MoEOverride, RouterConfig
from btx_nemo.errors import UserError
from btx_nemo.families import source as families_source
from btx_nemo.families.base import to_megatron
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.table import VOCABULARY, without_padding
from btx_nemo.plan.execute import TensorReader
from btx_nemo.plan.expr import FRESH, Expr, Full, Normal, Take, bind, infer, substitute
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.routers import router_class


@dataclass(frozen=True)
class ModelSource:
    """An architecture, and every weight of it as an expression over lazy readers."""

    model: ModelConfig
    expressions: Mapping[str, Expr]
    """Canonical Megatron key -> global tensor."""
    readers: Mapping[str, TensorReader] = field(default_factory=dict)
    tokenizer: Path | None = None
    """Folder with tokenizer files, where the source has them."""


def fresh_source(model: ModelConfig, router: RouterConfig | None = None) -> ModelSource:
    """A new model: N(0, init_std^2), divided by sqrt(2 L) where a layer writes to the residual stream, norms at one.

    The weights depend on the seed and each tensor's name alone, so that every layout starts from the same model.
    """

    def weights(key: str) -> Expr:
        if "norm" in key:
            return Full(1.0)
        if key.endswith(".bias"):
            return Full(0.0)
        if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
            return Normal(model.init_std / math.sqrt(2 * model.num_layers))
        return Normal(model.init_std)

    expressions = {key: weights(key) for key in to_megatron(model)}
    for key in set(expressions) & {*VOCABULARY}:  # a padded vocabulary must not change them
        info = TensorInfo((model.vocab_size, model.hidden_size), "float32")
        expressions[key] = bind(expressions[key], key, info)
    source = ModelSource(model=model, expressions=expressions)
    return _with_router(source, router or RouterConfig(), stored=frozenset())


def open_source(folder: Path, moe: MoEOverride | None = None, router: RouterConfig | None = None) -> ModelSource:
    """A Hugging Face folder, a checkpoint of ours, or a run directory (its latest checkpoint). Reads no tensor.

    `moe` changes a mixture's routing rule; what its router needs and the source lacks starts fresh, as `router` says.
    Raises UserError when `folder` is none of these, or is damaged, or the rule cannot route in this model.
    """
    return model_source(families_source.open_source(folder), moe, router)


def model_source(
    source: families_source.Source, moe: MoEOverride | None = None, router: RouterConfig | None = None
) -> ModelSource:
    """The same of a model that is open."""
    families_source.check_tied(source)
    expressions = {
        key: substitute(expr, source.name, source.table)
        if source.kind == "hf"
        else without_padding(Take(source.name, key), source.config, source.reader.layout())
        for key, expr in to_megatron(source.config, source.name).items()
    }
    result = ModelSource(
        model=override(source.config, moe or MoEOverride()),
        expressions=expressions,
        readers={source.name: source.reader},
        tokenizer=source.tokenizer,
    )
    stored = frozenset(source.reader.layout()) if source.kind == "megatron" else frozenset(expressions)
    return _with_router(result, router or RouterConfig(), stored=stored, reader=source.name)


def override(model: ModelConfig, moe: MoEOverride) -> ModelConfig:
    """The model with another routing rule. Raises UserError for a dense one."""
    rule = [f.name for f in dataclasses.fields(moe) if f"moe.{f.name}" not in SAME_RESULT]
    given = {name: getattr(moe, name) for name in rule if getattr(moe, name) is not None}
    if not given:
        return model
    if model.moe is None:
        raise UserError(f"moe.{next(iter(given))}: the model is dense and has no router")
    if given.get("router", model.moe.router) != model.moe.router:
        given.setdefault("options", {})  # another rule has other settings
    changed = dataclasses.replace(model.moe, **given)
    if (changed.shared_expert_intermediate_size or 0) < 0:
        raise UserError(
            f"moe.shared_expert_intermediate_size={changed.shared_expert_intermediate_size}: must not be negative"
        )
    only = router_class(changed.router).only_top_k
    if "top_k" not in given and only is not None:
        changed = dataclasses.replace(changed, top_k=only)
    return dataclasses.replace(model, moe=changed)


def _with_router(source: ModelSource, router: RouterConfig, *, stored: frozenset[str], reader: str = "") -> ModelSource:
    """The source with what the model's router needs: from the source where it is among `stored`, else fresh."""
    if source.model.moe is None:
        return source
    kind = router_class(source.model.moe.router)
    kind.check(source.model)
    expressions = {key: expr for key, expr in source.expressions.items() if ".mlp.router." not in key}
    given, tensors = False, {**kind.tensors(source.model, router), **_shared_expert(source.model)}
    _check_nothing_lost(source.model, stored)
    for layer in filter(source.model.is_mixture, range(source.model.num_layers)):
        for name, (_, fresh) in tensors.items():
            key = f"decoder.layers.{layer}.mlp.{name}"
            reset = router.reset and name.startswith("router.") and isinstance(fresh, FRESH)
            if key in stored and not reset:
                expressions[key] = source.expressions.get(key, Take(reader, key))
            elif fresh is None:
                raise UserError(f"moe.router={source.model.moe.router}: no {name} in the source; {_remedy(name)}")
            else:
                expressions[key] = fresh
                given = given or not isinstance(fresh, FRESH)
    readers = {**source.readers, **(kind.readers(source.model) if given else {})}
    result = dataclasses.replace(source, expressions=expressions, readers=readers)
    _check_shapes(result, tensors)
    return result


def _shared_expert(model: ModelConfig) -> Mapping[str, tuple[tuple[int, ...], Expr | None]]:
    """A layer's shared expert, as a router's `tensors`; a fresh one adds nothing at first."""
    width, hidden = model.moe.shared_expert_intermediate_size if model.moe else None, model.hidden_size
    if not width:
        return {}
    gate = model.moe is not None and model.moe.shared_expert_gate
    return {
        "shared_experts.linear_fc1.weight": ((2 * width, hidden), Normal(model.init_std)),
        "shared_experts.linear_fc2.weight": ((hidden, width), Full(0.0)),
        **({"shared_experts.gate_weight": ((1, hidden), Full(0.0))} if gate else {}),
    }


def _check_nothing_lost(model: ModelConfig, stored: frozenset[str]) -> None:
    assert model.moe is not None
    lost = next((key for key in stored if ".mlp.shared_experts." in key), None)
    if lost and not model.moe.shared_expert_intermediate_size:
        raise UserError(
            f"{lost}: the source has a shared expert, which moe.shared_expert_intermediate_size="
            f"{model.moe.shared_expert_intermediate_size} would lose; give its width"
        )


def _remedy(name: str) -> str:
    return f"give the folder that holds it, moe.options.{name.removeprefix('router.domain_')}=DIR"


def _check_shapes(source: ModelSource, tensors: Mapping[str, tuple[tuple[int, ...], Expr | None]]) -> None:
    layouts = {name: reader.layout() for name, reader in source.readers.items()}
    for key, expression in source.expressions.items():
        wanted = tensors.get(key.partition(".mlp.")[2])
        if wanted is None:
            continue
        found = infer(expression, layouts, TensorInfo(wanted[0], "float32")).shape
        if tuple(found) != wanted[0]:
            raise UserError(f"{key}: the source has {list(found)}, the router needs {list(wanted[0])}; see moe.options")
