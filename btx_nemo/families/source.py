"""A model on disk under the shared names (`families.names`): a Hugging Face folder or a Megatron checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from btx_nemo.checkpoints.atomic import TEMPORARY
from btx_nemo.checkpoints.bin_files import open_weights
from btx_nemo.checkpoints.dist_format import METADATA
from btx_nemo.checkpoints.files import read_json, read_regular, write_json
from btx_nemo.checkpoints.hub import local_folder
from btx_nemo.checkpoints.manifest import read_manifest
from btx_nemo.checkpoints.reader import Reader
from btx_nemo.checkpoints.respelled import respelled
from btx_nemo.checkpoints.safetensors import PRODUCER, SafetensorsReader
from btx_nemo.checkpoints.tokenizer_files import special_ids
from btx_nemo.checkpoints.torch_dist import DistReader
from btx_nemo.config.build import build
from btx_nemo.errors import UserError
from btx_nemo.families import base as families
from btx_nemo.families.architecture import architecture_of
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.names import parse_router
from btx_nemo.families.sizes import check_sizes
from btx_nemo.families.table import shared_width
from btx_nemo.plan.execute import BLOCK_BYTES
from btx_nemo.plan.expr import Expr, Take, infer, takes
from btx_nemo.plan.layout import Layout, row_blocks

MODEL_JSON = "model.json"
BESIDE = {
    "embeddings.json": "the domain embeddings of btx-nemo embed (a mix takes them as embeddings=)",
    "shared_per_expert.json": "what a BAR mixture keeps aside (add, remove and upgrade take it as aside=)",
}
"""A file of a folder that lies beside models -> what the folder is."""
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that are recomputed from the configuration."""
SHARED_GATE = re.compile(r"model\.layers\.\d+\.mlp\.shared_expert_gate\.weight")


@dataclass(frozen=True)
class Source:
    """One model: what it is, how to read it, and each of its tensors as an expression over what is stored."""

    name: str
    folder: Path
    kind: str
    """"hf" or "megatron"."""
    config: ModelConfig
    reader: Reader
    table: Mapping[str, Expr]
    """Shared name -> expression over `Take(name, stored tensor)`."""
    dropped: Mapping[str, str]
    """Stored tensors that are not used, and why."""
    base: Mapping[str, Any]
    """config.json to take token ids from."""
    tokenizer: Path
    """Folder with the tokenizer's files."""
    averages: tuple[str, ...] = ()
    """Stored weights in whose place their averages are read."""

    def layout(self) -> Layout:
        """Shapes and dtypes under the shared names. Raises UserError when a tensor is missing."""
        stored = {self.name: self.reader.layout()}
        try:
            return {shared: infer(expr, stored) for shared, expr in self.table.items()}
        except UserError as error:
            raise UserError(f"{self.folder}: {error}") from None

    def where(self, name: str) -> str:
        """The file that holds a tensor, or its first part, for errors; `name` is a shared one."""
        stored = sorted(take.name for take in takes(self.table[name]))
        return self.reader.where(stored[0]) if stored else str(self.folder)

    @property
    def dtype(self) -> str:
        """The dtype of most bytes."""
        counts: Counter[str] = Counter()
        for info in self.reader.layout().values():
            counts[info.dtype] += info.nbytes
        return counts.most_common(1)[0][0]


def open_source(folder: str | Path, name: str = "hf", *, allow_bin: bool = False, averaged: bool = False) -> Source:
    """Open a Hugging Face folder or hub id, a Megatron checkpoint, or a run directory (its latest checkpoint).

    Everything but the tensors' values is checked. `allow_bin` lets pytorch_model.bin be read; `averaged` takes a
    checkpoint's averages instead of the weights that have one. Raises UserError.
    """
    folder = local_folder(folder, allow_bin)
    refuse_temporary(folder)
    return open_unfinished(folder, name, allow_bin, averaged)


def open_unfinished(folder: Path, name: str, allow_bin: bool = False, averaged: bool = False) -> Source:
    """The same of a folder that its writer reads back before it gets its name."""
    for file, what in BESIDE.items():
        if (folder / file).is_file():
            raise UserError(f"{folder}: holds {what}, not a model; give the model's folder")
    checkpoint = find_checkpoint(folder)
    source = _open_megatron(checkpoint, name, averaged) if checkpoint else _open_hf(folder, name, allow_bin)
    _check_shapes(source)
    return source


def refuse_temporary(folder: Path) -> None:
    """Raise UserError for a folder that is still being written, or was when its process died."""
    if TEMPORARY.fullmatch(folder.absolute().name):
        raise UserError(f"{folder}: an unfinished output; run the command that writes it again")


def find_checkpoint(folder: Path) -> Path | None:
    """The Megatron checkpoint that a folder is, or (a run directory) points to with `latest`; None for neither."""
    if (folder / METADATA).exists() or (folder / MODEL_JSON).exists():
        return folder
    if not (folder / "latest").exists():
        if (folder / "checkpoints").is_dir() or (folder / "resolved.yaml").exists():
            raise UserError(f"{folder}: a run without a finished checkpoint; let it train until it saves one")
        return None
    name = read_regular(folder / "latest", 4096).decode("utf-8", "replace").strip()
    if not name or name != Path(name).name or name in (".", ".."):
        raise UserError(f"{folder / 'latest'}: {name!r} is not the name of a checkpoint")
    checkpoint = folder / "checkpoints" / name
    if not checkpoint.is_dir():
        raise UserError(f"{folder / 'latest'}: names {name!r}, which is not in {folder / 'checkpoints'}")
    return checkpoint


def _open_hf(folder: Path, name: str, allow_bin: bool) -> Source:
    base = read_json(folder / "config.json")
    architecture = architecture_of(base, str(folder / "config.json"))
    config = architecture.read(base, str(folder / "config.json"))
    reader = open_weights(folder, allow_bin)
    _check_counts(config, reader.layout(), folder)
    dropped = _unused(reader, config)
    if isinstance(reader, SafetensorsReader) and reader.producer == PRODUCER:
        read_manifest(folder)
    return Source(name, folder, "hf", config, reader, architecture.shared(config, name), dropped, base, folder)


def _check_counts(config: ModelConfig, stored: Layout, folder: Path) -> None:
    """Settings that claim far more than is stored are refused before a table is made for all that they claim."""
    experts = config.moe.num_experts if config.moe else 0
    stacked = max((info.shape[0] for name, info in stored.items() if ".mlp.experts.experts." in name), default=0)
    if config.num_layers > len(stored) or experts > max(len(stored), stacked):
        raise UserError(
            f"{folder}: settings of {config.num_layers} layers{f' and {experts} experts' if experts else ''}, but only "
            f"{len(stored)} tensors are stored; are the settings those of these weights?"
        )


def _unused(reader: Reader, config: ModelConfig) -> dict[str, str]:
    """Stored tensors that say nothing of the model, and why."""
    layout = reader.layout()
    dropped = {name: "recomputed from the configuration" for name in layout if BUFFERS.fullmatch(name)}
    if not shared_width(config):  # Qwen2Moe has one also then
        gates = [name for name in layout if SHARED_GATE.fullmatch(name)]
        dropped |= dict.fromkeys(gates, "gates a shared expert of width 0")
    dropped |= {name: "empty" for name, info in layout.items() if not info.numel}
    if config.tie_word_embeddings and "lm_head.weight" in layout:
        dropped["lm_head.weight"] = "tied: the embedding is the output layer"
    return dropped


def _open_megatron(folder: Path, name: str, averaged: bool) -> Source:
    read_manifest(folder)
    config = read_model_json(folder)
    stored = DistReader(folder, averaged=averaged)
    reader = respelled(stored)
    _check_counts(config, reader.layout(), folder)
    table = families.from_megatron(config, name, reader.layout())
    for shared in [shared for shared in table if parse_router(shared)]:
        expr = table[shared]
        if isinstance(expr, Take) and expr.name not in reader.layout():
            del table[shared]  # a router from outside of the package need not keep what ours do
    tokenizer = folder / "tokenizer"
    base = read_json(tokenizer / "config.json") if (tokenizer / "config.json").exists() else special_ids(tokenizer)
    averages = tuple(sorted(stored.averages)) if averaged else ()
    return Source(name, folder, "megatron", config, reader, table, {}, base, tokenizer, averages)


def read_model_json(folder: Path) -> ModelConfig:
    """ModelConfig from a checkpoint's model.json. Raises UserError."""
    path = folder / MODEL_JSON
    return check_sizes(build(ModelConfig, read_json(path), where=str(path)), str(path))


def save_model_config(config: ModelConfig, folder: Path) -> None:
    """Write model.json, which `read_model_json` reads."""
    write_json(folder / MODEL_JSON, dataclasses.asdict(config))


def _check_shapes(source: Source) -> None:
    expected = families.layout(source.config, "float32")
    settings = MODEL_JSON if source.kind == "megatron" else "config.json"
    for name, info in source.layout().items():
        if info.shape != expected[name].shape:
            raise UserError(
                f"{source.where(name)}: tensor {name!r} has shape {list(info.shape)} but {settings} implies "
                f"{list(expected[name].shape)}; is it the {settings} of these weights?"
            )
        if info.dtype not in ("float64", "float32", "bfloat16", "float16"):
            raise UserError(
                f"{source.where(name)}: tensor {name!r} is {info.dtype}; only floating-point weights are supported"
            )


def check_tied(source: Source) -> None:
    """Read a stored lm_head of a tied model: accepted only when it equals the embedding. Raises UserError otherwise."""
    if source.kind != "hf" or "lm_head.weight" not in source.dropped:
        return
    layout = source.reader.layout()
    head, embedding = layout["lm_head.weight"], layout["model.embed_tokens.weight"]
    same = head == embedding
    for box in row_blocks(head, BLOCK_BYTES) if same else ():
        slices = [slice(low, high) for low, high in box]
        parts = [source.reader.read(n, slices) for n in ("lm_head.weight", "model.embed_tokens.weight")]
        same = same and torch.equal(*(part.view(torch.uint8) for part in parts))
    if not same:
        raise UserError(
            f"{source.reader.where('lm_head.weight')}: tensor 'lm_head.weight' differs from the embedding although "
            f"config.json says tie_word_embeddings; set it to false or remove the tensor"
        )
