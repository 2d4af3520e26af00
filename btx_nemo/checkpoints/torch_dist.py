"""Reading Megatron's torch_dist checkpoints without Megatron and without building a model."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from btx_nemo.checkpoints.direct import PastCache
from btx_nemo.checkpoints.dist_format import Payload, StoredTensor, locate, read_metadata
from btx_nemo.checkpoints.files import open_regular
from btx_nemo.checkpoints.reader import Reader, read_box
from btx_nemo.errors import UserError
from btx_nemo.plan.layout import Box, Layout, TensorInfo

AVERAGES = "ema."
"""What the keys of averaged weights begin with; the key of the weight follows."""
STATE_PREFIXES = (AVERAGES, "optimizer.", "chained_", "rng_state", "common_state", "opt_param_scheduler", "rerun_state")
"""Keys of training state, which a model's weights never begin with."""


class DistReader(Reader):
    """The model weights of a torch_dist checkpoint; keys of training state are left out.

    With `averaged`, the averages of those that have one, and the weights of all others.
    Raises UserError naming file and tensor when something is missing or damaged, or there are no averages.
    """

    def __init__(self, folder: str | Path, *, averaged: bool = False) -> None:
        self.folder = Path(folder)
        self.training_state: list[str] = []
        """Keys that were left out."""
        self._tensors: dict[str, StoredTensor] = {}
        stored = read_metadata(self.folder)
        for key, tensor in stored.items():
            if key.startswith(STATE_PREFIXES):
                self.training_state.append(key)
            else:
                self._tensors[key] = tensor
        self.averages: dict[str, StoredTensor] = {}
        """By the key of the weight."""
        for key in filter(lambda key: key.startswith(AVERAGES), stored):
            self.averages[key.removeprefix(AVERAGES)] = stored[key]
        if averaged:
            self._take_averages()
        self._layout = {key: tensor.info for key, tensor in self._tensors.items()}
        self._payloads: dict[tuple[str, int], Payload] = {}
        self._check_files()

    def _take_averages(self) -> None:
        if not self.averages:
            raise UserError(
                f"{self.folder}: holds no averages of its weights; a run keeps them with ema.decay above 0; leave ema"
            )
        for key, average in self.averages.items():
            weight = self._tensors.get(key)
            if weight is None or weight.info.shape != average.info.shape:
                found = "no weight" if weight is None else f"a weight of {list(weight.info.shape)}"
                raise UserError(f"{self.folder}: average of {key!r} {list(average.info.shape)}, but {found}; damaged")
        self._tensors |= self.averages

    def _check_files(self) -> None:
        ends: dict[str, tuple[int, str]] = {}
        for key, tensor in self._tensors.items():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, (0, "")), (chunk.offset + chunk.length, key))
        for file, (end, key) in ends.items():
            fd = open_regular(self.folder / file)
            size = os.fstat(fd).st_size
            os.close(fd)
            if size < end:
                raise UserError(
                    f"{self.folder / file}: tensor {key!r} ends at byte {end} but the file has {size}; truncated"
                )

    def layout(self) -> Layout:
        """Names, global shapes and dtypes of the model's tensors."""
        return self._layout

    def where(self, name: str) -> str:
        """The file with the tensor's first part."""
        return str(self.folder / self._tensors[name].chunks[0].file)

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read one part from the chunks that it meets, and only the bytes that it needs of them."""
        for number, chunk in enumerate(self._tensors[name].chunks):
            meet = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, chunk.box, strict=True))
            if any(low >= high for low, high in meet):
                continue
            inside = tuple((low - base, high - base) for (low, high), (base, _) in zip(meet, chunk.box, strict=True))
            view = out[tuple(slice(low - base, high - base) for (low, high), (base, _) in zip(meet, box, strict=True))]
            self._read_chunk(name, number, inside, view)

    def _read_chunk(self, name: str, number: int, box: Box, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        chunk = tensor.chunks[number]
        path = str(self.folder / chunk.file)
        fd = open_regular(self.folder / chunk.file)
        past = PastCache(fd, self.folder / chunk.file)
        try:
            payload = self._payloads.get((name, number))
            if payload is None:
                payload = self._payloads[name, number] = locate(fd, chunk, path, name)
            shape = tuple(high - low for low, high in chunk.box)
            if payload.info != TensorInfo(shape, tensor.info.dtype):
                raise UserError(
                    f"{path}: tensor {name!r}: part is {payload.info}, not {list(shape)} as recorded; damaged"
                )
            whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
            read_box(past if self.once else fd, payload.start, shape, box, whole, path, name)
            if whole is not out:
                out.copy_(whole)
        finally:
            past.close()
            os.close(fd)
