"""All that can be checked before a run builds anything, so that a mistake costs seconds and not a queue."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from btx_nemo.checkpoints.atomic import TEMPORARY
from btx_nemo.checkpoints.tokenizer_files import tokenizer_files, vocabulary
from btx_nemo.config.build import build
from btx_nemo.config.choice import check_choice
from btx_nemo.config.flat import flat
from btx_nemo.config.load import read_resolved
from btx_nemo.config.schema import NO_EFFECT, RECOMPUTE_MODULES, SAME_RESULT, TrainConfig
from btx_nemo.data.blend import check_blend_kinds, check_data, list_domains, normalise_weights
from btx_nemo.data.sampler import num_microbatches
from btx_nemo.errors import UserError
from btx_nemo.families.sizes import check_sizes
from btx_nemo.megatron.model import RECOMPUTATION
from btx_nemo.megatron.parallel import check_batch, check_layout, world_size
from btx_nemo.megatron.precision import Device
from btx_nemo.megatron.preflight import check_precision
from btx_nemo.train.average import check_ema
from btx_nemo.train.checkpoint import LATEST, complete_checkpoints
from btx_nemo.train.contents import Content, blend_of, contents_of
from btx_nemo.train.data_record import check_data_record
from btx_nemo.train.dropout import check_dropout
from btx_nemo.train.lock import LOCK
from btx_nemo.train.names import parameter_sizes
from btx_nemo.train.optimizer import check_optim
from btx_nemo.train.source import ModelSource, fresh_source, open_source, override
from btx_nemo.train.stages import STAGES, check_kinds, check_stage, check_trained
from btx_nemo.train.track import check_log
from btx_nemo.train.watch import check_robust

MAY_CHANGE = (*NO_EFFECT, "out")
"""Keys that a resumed run may change, besides SAME_RESULT."""


@dataclass(frozen=True)
class Prepared:
    """A run that may start."""

    out: Path
    source: ModelSource
    tokenizer: Path | None
    """Folder with the tokenizer's files, which go along with every checkpoint."""
    contents: dict[str, Content]
    """What each training domain holds."""
    documents: bool
    """Whether a sequence may hold several documents, each for itself."""


def prepare(config: TrainConfig) -> Prepared:
    """Checks the whole configuration against the model, the data, the ranks and the run directory."""
    check_choice("stage", config.stage, STAGES)
    check_choice("recompute", config.recompute, RECOMPUTATION)
    for module in config.recompute_modules:
        check_choice("recompute_modules", module, RECOMPUTE_MODULES)
    for name in ("micro_batch_size", "global_batch_size", "eval_batches", "log_every"):
        if getattr(config, name) < 1:
            raise UserError(f"{name}={getattr(config, name)}: must be 1 or more")
    for name, value in (
        ("steps", config.steps),
        ("eval_every", config.eval_every),
        ("checkpoint.every", config.checkpoint.every),
    ):
        if not 0 <= value < float("inf"):
            raise UserError(f"{name}={value}: must not be negative")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed={config.seed}: must lie between 0 and {2**32 - 1}")
    if config.steps * config.global_batch_size >= 2**31:
        raise UserError(
            f"steps={config.steps} x global_batch_size={config.global_batch_size}: Megatron's sample index holds fewer "
            f"than {2**31} sequences; lower one of them"
        )
    if config.checkpoint.keep < 1:
        raise UserError(f"checkpoint.keep={config.checkpoint.keep}: must be 1 or more")
    check_optim(config)
    check_ema(config)
    check_robust(config)
    check_log(config)
    source = _source(config)
    check_stage(config, source.model)
    check_trained(config, list(parameter_sizes(source.model)))
    check_dropout(config.dropout, source.model, config.layout)
    ranks = world_size()
    check_layout(config.layout, ranks, source.model)
    check_precision(config, source.model, Device.here())
    microbatches = num_microbatches(
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        dp_size=config.layout.dp(ranks),
    )
    check_batch(config.layout, seq_length=config.data.seq_length, microbatches=microbatches)
    contents, documents = _check_tokens(config, source)
    out = Path(config.out)
    _check_out(out, config)
    return Prepared(
        out=out, source=source, tokenizer=_tokenizer(config, source), contents=contents, documents=documents
    )


def _source(config: TrainConfig) -> ModelSource:
    if (config.init_from is None) == (config.model is None):
        raise UserError("init_from and model: give one of them, the weights to start from or a fresh architecture")
    if config.model is not None:
        return fresh_source(override(check_sizes(config.model, "model"), config.moe), config.router)
    assert config.init_from is not None
    if not Path(config.init_from).is_dir():
        raise UserError(
            f"init_from={config.init_from}: no such folder; give a Hugging Face folder, a checkpoint or a run "
            "directory (BTX_SEED sets the default; btx-nemo demo --until seed makes a small one)"
        )
    return open_source(Path(config.init_from), config.moe, config.router)


def _check_tokens(config: TrainConfig, source: ModelSource) -> tuple[dict[str, Content], bool]:
    """What each training domain holds, and whether documents are kept apart."""
    path, data = Path(config.data.path), config.data
    if not path.is_dir():
        raise UserError(
            f"data.path={path}: no such folder; prepare one with btx-nemo prepare-data (or --demo), or set BTX_DATA"
        )
    _check_vocabulary(path, source)
    blend, valid = blend_of(config)
    metas = check_data(path, [*blend, *valid], source.model.vocab_size)
    normalise_weights(blend, list_domains(path))
    kinds = {metas[domain]["kind"] for domain in blend}
    check_kinds(config, kinds)
    if config.epochs is None:
        check_blend_kinds(kinds)
    if not 1 < data.seq_length <= source.model.max_position_embeddings:
        raise UserError(
            f"data.seq_length={data.seq_length}: must lie between 2 and the model's "
            f"max_position_embeddings={source.model.max_position_embeddings}"
        )
    chats = any(meta["kind"] == "chat" for meta in metas.values())
    if data.document_mask and any(meta["kind"] == "text" and meta["eod_id"] is None for meta in metas.values()):
        raise UserError(f"data.document_mask=true: no token ends a document in {path}; prepare it with --eod-token")
    return contents_of(config), chats or data.document_mask


def _check_vocabulary(data: Path, source: ModelSource) -> None:
    """Every token of the data has the same id in the model's tokenizer, where both are known."""
    theirs = vocabulary(data / "tokenizer")
    ours = vocabulary(source.tokenizer) if source.tokenizer else None
    for token, number in (theirs or {}).items():
        if ours and ours.get(token) != number:
            raise UserError(
                f"data.path={data}: token {token!r} is {number} there but {ours.get(token, 'unknown')} in "
                f"{source.tokenizer}; prepare the data with the model's tokenizer"
            )


def _check_out(out: Path, config: TrainConfig) -> None:
    """A new folder, or the one of this very run; without a checkpoint it has nothing to agree with."""
    if not out.exists():
        return
    resolved = out / "resolved.yaml"
    if not out.is_dir() or (not resolved.exists() and any(_foreign(path) for path in out.iterdir())):
        raise UserError(f"out={out}: exists and is no run directory; choose another")
    if not resolved.exists() or not ((out / LATEST).exists() or complete_checkpoints(out / "checkpoints")):
        return
    before = read_resolved(resolved)
    if before is None:
        raise UserError(f"{resolved}: damaged; choose another out, or put back the file that the run was started with")
    with contextlib.suppress(UserError):  # settings that are newer than the run had their defaults
        before = dataclasses.asdict(build(TrainConfig, before, where=str(resolved)))
    now = dataclasses.asdict(config)
    fixed = [key for key in now if key in before and key not in MAY_CHANGE]
    then, now = (flat({key: values[key] for key in fixed}) for values in (before, now))
    for key in {**now, **then}:
        if key not in SAME_RESULT and then.get(key) != now.get(key):
            raise UserError(
                f"out={out}: was started with {key}={then.get(key)}, now {key}={now.get(key)}; "
                "resume with the old value, or choose another out"
            )
    check_data_record(out, config)


def _foreign(path: Path) -> bool:
    return path.name != LOCK and not TEMPORARY.fullmatch(path.name)


def _tokenizer(config: TrainConfig, source: ModelSource) -> Path | None:
    given = Path(config.tokenizer) if config.tokenizer else None
    for folder in [given] if given else [source.tokenizer, Path(config.data.path) / "tokenizer"]:
        if folder is not None and tokenizer_files(folder):
            return folder
    if given:
        raise UserError(f"tokenizer={given}: no tokenizer there; give the folder of a Hugging Face tokenizer")
    return None
