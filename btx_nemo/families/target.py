"""In which of Hugging Face's architectures a model is written: the native one wherever it computes the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from btx_nemo.errors import UserError
from btx_nemo.families.architecture import ANY_FAMILY, SHARED, Architecture, architectures
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.inference import InferenceForm, inference_form
from btx_nemo.families.source import Source
from btx_nemo.plan.expr import substitute


@dataclass(frozen=True)
class Target:
    """An architecture, and the model as it is written in it."""

    architecture: Architecture
    model: ModelConfig
    """The model itself, or its `InferenceForm`."""
    chosen: str
    """Why this one, in one line."""
    exact: bool = True
    form: InferenceForm | None = None

    def view(self, source: Source) -> Source:
        """The source as the model that is written: its tensors as expressions over what is stored."""
        if self.form is None:
            return source
        table = {name: substitute(expr, SHARED, source.table) for name, expr in self.form.tensors.items()}
        return dataclasses.replace(source, config=self.model, table=table)


def choose_target(
    model: ModelConfig,
    base: Mapping[str, Any],
    where: str,
    target: str | None = None,
    *,
    allow_inexact: bool = False,
    dtype: str = "float32",
    to_train: bool = False,
) -> Target:
    """The architecture to write a model in: `target`, else that of `base` when it fits, else the first exact one.

    Those of the model's own family come first, and the one that holds any family last. `dtype` is what weights are
    written in; with `to_train` only what comes back as the same model will do, not its inference alone.
    Raises UserError, with the reasons, when none computes what the model does, or `target` does not and `allow_inexact`
    is not given, or has no place for one of its tensors.
    """
    known = architectures()
    form = None if to_train else inference_form(model, dtype)
    if target is not None:
        if target not in known:
            raise UserError(f"target={target}: unknown; known: {', '.join(sorted(known))}")
        return _forced(known[target], model, form, where, allow_inexact, dtype)
    candidates = sorted(
        known.values(),
        key=lambda a: (a.family == ANY_FAMILY, a.model_type != base.get("model_type"), a.family != model.family),
    )
    reasons: list[str] = []
    rounded: list[str] = []
    for architecture in candidates:
        reason = architecture.inexact(model)
        if reason is None:
            return Target(architecture, model, _exactly(architecture, model, rounded))
        if form and architecture.inexact(form.model) is None:
            rounds = _rounds(architecture, form, dtype)
            if rounds is None:
                said = f"{_exactly(architecture, model)}; with {form.how}; target=btx_moe keeps what trains"
                return Target(architecture, form.model, said, form=form)
            rounded.append(rounds)
        if _alike(architecture, model):
            reasons.append(reason)
    raise UserError(f"{where}: no architecture of Hugging Face is exact: {'; '.join(dict.fromkeys(reasons))}")


def _forced(
    architecture: Architecture,
    model: ModelConfig,
    form: InferenceForm | None,
    where: str,
    allow_inexact: bool,
    dtype: str,
) -> Target:
    reason = architecture.inexact(model)
    if reason is None:
        return Target(architecture, model, _exactly(architecture, model))
    if form and architecture.inexact(form.model) is None:
        rounds = _rounds(architecture, form, dtype)
        if rounds is None or allow_inexact:
            said = f"{architecture.model_type}, as asked, with {form.how}" + (f"; although {rounds}" if rounds else "")
            return Target(architecture, form.model, said, exact=rounds is None, form=form)
        reason = rounds
    else:
        architecture.stored(model)  # a tensor without a place there is refused, whatever is allowed
    if not allow_inexact:
        raise UserError(f"{where}: {reason}; leave target out, or give allow_inexact=true")
    return Target(architecture, model, f"{architecture.model_type}, as asked, although {reason}", exact=False)


def _rounds(architecture: Architecture, form: InferenceForm, dtype: str) -> str | None:
    if form.computed and dtype != "float32":
        return f"{architecture.model_type} would round the projected router to {dtype} (dtype=float32 does not)"
    return None


def _exactly(architecture: Architecture, model: ModelConfig, more: Sequence[str] = ()) -> str:
    """Which, and why not the others of the model's family."""
    family = [a for a in architectures().values() if a.family == model.family and a is not architecture]
    reasons = [other.inexact(model) for other in family if _alike(other, model)]
    return "; ".join([f"{architecture.model_type}, which computes what the model does", *filter(None, reasons), *more])


def _alike(architecture: Architecture, model: ModelConfig) -> bool:
    """Whether both are mixtures, or both dense: why it is not the other is no news."""
    return getattr(architecture, "mixture", True) == (model.moe is not None)
