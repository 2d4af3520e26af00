"""Old Hugging Face folders: pytorch_model.bin, one file or shards with an index.

Such a file is a pickle. It is read only where the user asks for it, and only by torch's unpickler for weights
(`weights_only`), which makes tensors and containers and calls nothing else. Tensors stay on the disk until read.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from btx_nemo.checkpoints.files import open_regular
from btx_nemo.checkpoints.reader import Reader
from btx_nemo.checkpoints.safetensors import SafetensorsReader, read_index
from btx_nemo.errors import UserError
from btx_nemo.plan.layout import ITEMSIZE, Box, Layout, TensorInfo

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"


def open_weights(folder: Path, allow_bin: bool = False) -> SafetensorsReader | BinReader:
    """The weights of a Hugging Face folder: its safetensors, else with `allow_bin` its pytorch_model.bin.

    Raises UserError when there are none that may be read, or when they are damaged.
    """
    names = sorted(os.listdir(folder))
    if any(name.endswith(".safetensors") or name == "model.safetensors.index.json" for name in names):
        return SafetensorsReader(folder)
    found = [name for name in names if name in (SINGLE, INDEX)]
    if found and not allow_bin:
        raise UserError(
            f"{folder}: no safetensors, and {found[0]} is a pickle; save it as safetensors, or give mix or import "
            "allow_bin=true to have its tensors, and nothing else, unpickled"
        )
    return BinReader(folder) if found else SafetensorsReader(folder)


class BinReader(Reader):
    """The weights of one folder's pytorch_model.bin, single or sharded.

    Raises UserError naming the file and the tensor when anything does not fit.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._tensors: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        index = self.folder / INDEX
        weight_map = read_index(index) if index.exists() else None
        for file in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
            self._add(file, weight_map)
        for name, file in (weight_map or {}).items():
            if self._file_of.get(name) != file:
                raise UserError(f"{self.folder / file}: tensor {name!r} is in {INDEX} but not in the file")
        self._layout = {
            name: TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        }

    def _add(self, file: str, weight_map: dict[str, str] | None) -> None:
        path = self.folder / file
        self._sizes[file] = os.stat(path).st_size if path.exists() else 0
        for name, tensor in _load(path).items():
            if name in self._file_of:
                raise UserError(f"{path}: tensor {name!r} is also in {self._file_of[name]}; keep one")
            if weight_map is not None and weight_map.get(name) != file:
                raise UserError(f"{path}: holds tensor {name!r} but {INDEX} does not place it there; correct the index")
            self._tensors[name], self._file_of[name] = tensor, file

    def layout(self) -> Layout:
        """Names, shapes and dtypes of all tensors."""
        return self._layout

    def where(self, name: str) -> str:
        """The path of the file that holds the tensor."""
        return str(self.folder / self._file_of[name])

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Copy one part; its pages are read from the file."""
        file = self._file_of[name]
        if os.stat(self.folder / file).st_size != self._sizes[file]:  # pages that are gone would end the process
            raise UserError(f"{self.where(name)}: size changed while it was in use (tensor {name!r}); run again")
        out.copy_(self._tensors[name][tuple(slice(low, high) for low, high in box)])


def _load(path: Path) -> dict[str, torch.Tensor]:
    os.close(open_regular(path))  # whatever is no regular file is refused at once
    try:
        table = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle can fail in any way
        reason = str(error).strip().split("\n")[0].split(". ")[0][:200]
        raise UserError(
            f"{path}: cannot be read as weights alone ({type(error).__name__}: {reason}); save it as safetensors"
        ) from None
    if not isinstance(table, dict) or not table:
        raise UserError(f"{path}: holds no table of tensors; is it a model's weights?")
    for name, tensor in table.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"{path}: {str(name)[:80]!r} is not a tensor; is it a model's weights?")
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or kind not in ITEMSIZE:
            raise UserError(
                f"{path}: tensor {name!r} is {tensor.layout} {kind} on {tensor.device}; only dense ones are read"
            )
    return table
