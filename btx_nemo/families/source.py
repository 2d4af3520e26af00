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
from btx_nemo.checkpoints.dist_format import METADATA
from btx_nemo.checkpoints.files import read_json, read_regular, write_json
from btx_nemo.checkpoints.manifest import read_manifest
from btx_nemo.checkpoints.reader import Reader
from btx_nemo.checkpoints.safetensors import SafetensorsReader
from btx_nemo.checkpoints.tokenizer_files import special_ids
from btx_nemo.checkpoints.torch_dist import DistReader
from btx_nemo.config.build import build
from btx_nemo.errors import UserError
from btx_nemo.families import base as families
from btx_nemo.families.architecture import architecture_of
from btx_nemo.families.config import ModelConfig
from btx_nemo.families.names import parse_router
from btx_nemo.families.sizes import check_sizes
from btx_nemo.plan.execute import BLOCK_BYTES
from btx_nemo.plan.expr import Expr, Take, infer
from btx_nemo.plan.layout import Layout, row_blocks

MODEL_JSON = "model.json"
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that are recomputed from the configuration."""


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

    def layout(self) -> Layout:
        """Shapes and dtypes under the shared names. Raises UserError when a tensor is missing."""
        stored = {self.name: self.reader.layout()}
        try:
            return {shared: infer(expr, stored) for shared, expr in self.table.items()}
        except UserError as error:
            raise UserError(f"{self.folder}: {error}") from None

    @property
    def dtype(self) -> str:
        """The dtype of most bytes."""
        counts: Counter[str] = Counter()
        for info in self.reader.layout().values():
            counts[info.dtype] += info.nbytes
        return counts.most_common(1)[0][0]


def open_source(folder: str | Path, name: str = "hf") -> Source:
    """Open a Hugging Face folder, a Megatron checkpoint, or a run directory (its latest checkpoint).

    Everything but the tensors' values is checked. Raises UserError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a Hugging Face folder, a checkpoint or a run directory")
    refuse_temporary(folder)
    checkpoint = find_checkpoint(folder)
    source = _open_megatron(checkpoint, name) if checkpoint else _open_hf(folder, name)
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


def _open_hf(folder: Path, name: str) -> Source:
    base = read_json(folder / "config.json")
    architecture = architecture_of(base, str(folder / "config.json"))
    config = architecture.read(base, str(folder / "config.json"))
    reader = SafetensorsReader(folder)
    dropped = {tensor: "recomputed from the configuration" for tensor in reader.layout() if BUFFERS.fullmatch(tensor)}
    if config.tie_word_embeddings and "lm_head.weight" in reader.layout():
        dropped["lm_head.weight"] = "tied: the embedding is the output layer"
    if any(header.metadata.get("producer") == "btx_nemo" for header in reader.headers.values()):
        read_manifest(folder)
    return Source(name, folder, "hf", config, reader, architecture.shared(config, name), dropped, base, folder)


def _open_megatron(folder: Path, name: str) -> Source:
    read_manifest(folder)
    config = read_model_json(folder)
    reader = DistReader(folder)
    table = families.from_megatron(config, name)
    for shared in [shared for shared in table if parse_router(shared)]:
        expr = table[shared]
        if isinstance(expr, Take) and expr.name not in reader.layout():
            del table[shared]  # a router from outside of the package need not keep what ours do
    tokenizer = folder / "tokenizer"
    base = read_json(tokenizer / "config.json") if (tokenizer / "config.json").exists() else special_ids(tokenizer)
    return Source(name, folder, "megatron", config, reader, table, {}, base, tokenizer)


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
                f"{source.folder}: tensor {name!r} has shape {list(info.shape)} but {settings} implies "
                f"{list(expected[name].shape)}; is it the {settings} of these weights?"
            )
        if info.dtype not in ("float64", "float32", "bfloat16", "float16"):
            raise UserError(
                f"{source.folder}: tensor {name!r} is {info.dtype}; only floating-point weights are supported"
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
