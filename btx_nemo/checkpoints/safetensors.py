"""Hugging Face folders of safetensors: one file, or shards with an index; read lazily by pread."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from btx_nemo.checkpoints.direct import PastCache
from btx_nemo.checkpoints.files import open_regular, read_json
from btx_nemo.checkpoints.reader import Reader, read_box
from btx_nemo.checkpoints.safetensors_header import Header, read_header
from btx_nemo.errors import UserError
from btx_nemo.plan.layout import Box, Layout

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PRODUCER = "btx_nemo"
"""Value of the header's metadata key `producer` in our files: a manifest belongs to them."""
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


class SafetensorsReader(Reader):
    """The weights of one Hugging Face folder; headers, index and files are checked against each other when opened.

    Raises UserError naming the file and the tensor when anything does not fit.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, Header] = {}
        """File name -> its header."""
        self._file_of: dict[str, str] = {}
        self._open()
        self._layout = {name: self.headers[file].entries[name].info for name, file in self._file_of.items()}

    def _open(self) -> None:
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder; give a Hugging Face folder with safetensors")
        present = sorted(os.listdir(self.folder))
        if INDEX in present:
            if SINGLE in present:
                raise UserError(f"{self.folder}: has both {SINGLE} and {INDEX}; remove the one that is not meant")
            self._open_sharded(present)
        elif SINGLE in present:
            self._add(SINGLE, None)
        else:
            shards = [name for name in present if SHARD.fullmatch(name)]
            if shards:
                raise UserError(f"{self.folder}: has {shards[0]} but no {INDEX}; copy the index as well")
            raise UserError(f"{self.folder}: no safetensors weights; expected {SINGLE} or {INDEX}")
        if not self._file_of:
            raise UserError(f"{self.folder}: the weights hold no tensor; copy the folder again")

    def _open_sharded(self, present: list[str]) -> None:
        weight_map = read_index(self.folder / INDEX)
        files = set(weight_map.values())
        for name in present:
            if SHARD.fullmatch(name) and name not in files:
                raise UserError(f"{self.folder / name}: shard is not named in {INDEX}; remove it or correct the index")
        for file in sorted(files):
            if file not in present:
                tensor = next(name for name, at in weight_map.items() if at == file)
                raise UserError(f"{self.folder / file}: missing shard, named in {INDEX} for {tensor!r}; copy it again")
            self._add(file, weight_map)
        for name, file in weight_map.items():
            if self._file_of.get(name) != file:
                raise UserError(f"{self.folder / file}: tensor {name!r} is in {INDEX} but not in the file")

    def _add(self, file: str, weight_map: dict[str, str] | None) -> None:
        try:
            header = read_header(self.folder / file)
        except UserError as error:
            held = next((name for name, at in (weight_map or {}).items() if at == file), None)
            if held is None or "tensor '" in str(error):
                raise
            raise UserError(f"{error} ({INDEX} places tensor {held!r} there)") from None
        for name in header.entries:
            if name in self._file_of:
                raise UserError(f"{self.folder / file}: tensor {name!r} is also in {self._file_of[name]}; keep one")
            if weight_map is not None and weight_map.get(name) != file:
                place = weight_map.get(name)
                says = f"{INDEX} places it in {place}" if place else f"{INDEX} does not name it"
                raise UserError(f"{self.folder / file}: holds tensor {name!r} but {says}; correct the index")
            self._file_of[name] = file
        self.headers[file] = header

    def layout(self) -> Layout:
        """Names, shapes and dtypes of all tensors."""
        return self._layout

    @property
    def producer(self) -> str | None:
        """Who wrote the files, where one of them says so."""
        return next((h.metadata["producer"] for h in self.headers.values() if "producer" in h.metadata), None)

    def where(self, name: str) -> str:
        """The path of the file that holds the tensor."""
        return str(self.folder / self._file_of[name])

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Read one part by pread. The file is opened for each part: no limit on the number of shards."""
        file = self._file_of[name]
        entry = self.headers[file].entries[name]
        path = self.folder / file
        fd = open_regular(path)
        past = PastCache(fd, path)
        try:
            if os.fstat(fd).st_size != self.headers[file].size:
                raise UserError(
                    f"{path}: size changed while it was in use (tensor {name!r}); run again when it is still"
                )
            read_box(past if self.once else fd, entry.start, entry.info.shape, box, out, str(path), name)
        finally:
            past.close()
            os.close(fd)


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index file, checked: tensor names to plain file names of the same folder."""
    table = read_json(path)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: no weight_map; not an index of safetensors shards")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or file != os.path.basename(file) or "\0" in file:
            raise UserError(f"{path}: tensor {name!r}: {file!r} is not the name of a file in this folder")
    return weight_map
