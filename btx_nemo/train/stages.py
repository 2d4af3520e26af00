"""What a stage is: which models it trains, and what must stay as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from btx_nemo.config.choice import check_choice
from btx_nemo.config.schema import DENSE_STAGES, TrainConfig
from btx_nemo.data.prepare import KINDS
from btx_nemo.errors import UserError
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.target import choose_target
from btx_nemo.routers import router_class
from btx_nemo.routers.losses import check_loss_names
from btx_nemo.train.names import frozen_names

STAGES = ("expert", "mix", "router", "bar_expert", "sft")
_MIXTURES = ("mix", "router", "bar_expert", "sft")


def check_stage(config: TrainConfig, model: ModelConfig) -> None:
    """Raises UserError for a stage that cannot train this model, or would train what it must not."""
    check_loss_names(config.router.losses)
    if model.moe is not None and config.stage not in _MIXTURES:
        raise UserError(
            f"stage={config.stage} trains a dense model, but {config.init_from} has {model.moe.num_experts} experts"
        )
    if model.moe is None and config.stage not in DENSE_STAGES:
        raise UserError(
            f"stage={config.stage} trains a mixture, but {config.init_from} is dense; assemble one: btx-nemo mix"
        )
    if model.moe is not None:
        router_class(model.moe.router).check_training(model, config.router)
    if config.stage == "bar_expert":
        _check_anchor(config, model)
    if config.export:
        choose_target(model, {}, "export=true")


def _check_anchor(config: TrainConfig, model: ModelConfig) -> None:
    """A merge needs the anchor's expert and router row to the bit (BAR, section 3.2; FlexOlmo, section 3.1)."""
    moe = model.moe
    assert moe is not None
    if moe.num_experts != 2 or moe.router != "flexolmo":
        raise UserError(
            f"stage=bar_expert trains a two-expert model, but {config.init_from} has {moe.num_experts} experts and "
            f"router={moe.router}; make one: btx-nemo mix --config-name two_expert"
        )
    if config.router.frozen_rows != [0]:
        raise UserError(f"router.frozen_rows={config.router.frozen_rows}: the anchor's row must stay; give [0]")


def check_trained(config: TrainConfig, names: Sequence[str]) -> None:
    """Raises UserError for a pattern that matches none of the model's parameters, and for what must not train."""
    frozen = frozen_names(names, config)
    for name in names:
        if name in frozen:
            continue
        if config.stage == "bar_expert" and ".experts.local_experts.0." in name:
            raise UserError(f"{name}: would train, but the anchor's expert must stay; mend train or freeze")
        if config.stage == "router" and ".mlp.router." not in name:
            raise UserError(
                f"{name}: would train, but stage=router trains routers alone; give train=[*.mlp.router.*], or stage=mix"
            )


def check_kinds(config: TrainConfig, kinds: Iterable[str]) -> None:
    """Raises UserError where a stage does not train on data of these kinds (text, chat)."""
    wanted = config.data.kind
    if wanted is not None:
        check_choice("data.kind", wanted, KINDS)
        if wanted not in kinds:
            raise UserError(
                f"data.path={config.data.path}: has no {wanted}, which this stage trains on (data.kind={wanted}); "
                "give the folder that has it"
            )
    if config.stage == "sft" and "chat" not in kinds:
        other = "stage=expert (dense) or stage=mix (a mixture)"
        raise UserError(f"stage=sft: trains on chats, but all in data.path={config.data.path} is text; give {other}")
