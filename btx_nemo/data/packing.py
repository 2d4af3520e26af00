"""Whole conversations side by side in sequences of one length: none is cut unless it is longer than a sequence.

A conversation of n tokens takes n - 1 places: its last token is only ever predicted. Each is a document of its own,
with positions from 0; what is left of a sequence is padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from btx_nemo.data.indexed import open_indexed
from btx_nemo.data.order import sample_documents


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Which documents lie in which sequence."""

    sequences: list[list[int]]
    """Numbers of the documents of each sequence, in their order there."""
    places: int
    """Places that documents take in all."""
    cut: int
    """Documents that are longer than a sequence: their end is lost."""
    lost: int
    """Tokens that are lost so."""


def sampled(prefix: Path, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of every document of a domain's split, and the numbers of those in a share of it.

    The domain, on which the choice depends (`order.sample_documents`), is the name of the folder. Raises UserError for
    an index that is missing or damaged.
    """
    lengths = open_indexed(prefix).lengths
    return lengths, sample_documents(len(lengths), share, prefix.parent.name)


def pack(lengths: np.ndarray, documents: np.ndarray, seq_length: int) -> Packing:
    """Best-fit decreasing: the longest first, each into the fullest sequence that has room for it.

    Args:
        lengths: tokens of every document of the file.
        documents: numbers of those to pack.
        seq_length: S, places of a sequence.
    """
    places = lengths[documents].astype(np.int64) - 1
    lost = np.maximum(places - seq_length, 0)
    kept = np.minimum(places, seq_length)
    sequences: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of with_room, sorted
    for index in np.argsort(-kept, kind="stable").tolist():
        need = int(kept[index])
        at = bisect_left(rooms, need)
        if at == len(rooms):
            room, number = seq_length, len(sequences)
            sequences.append([])
        else:
            room = rooms[at]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        sequences[number].append(int(documents[index]))
        left = room - need
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(number)
    return Packing(sequences=sequences, places=int(kept.sum()), cut=int((lost > 0).sum()), lost=int(lost.sum()))


class PackedChats:
    """Sequences of conversations; item i is sequence i of the packing.

    An item has `tokens`, `labels`, `position_ids` [S] int64, `loss_mask` [S] float32 (1 where the next token is the
    assistant's) and `padding` [S] bool. Positions start again with each conversation, and with the padding.
    """

    def __init__(self, prefix: Path, targets: Path, packing: Packing, seq_length: int):
        self.packing, self.seq_length = packing, seq_length
        self._ids, self._targets = open_indexed(prefix), open_indexed(targets)

    def __len__(self) -> int:
        return len(self.packing.sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        size = self.seq_length
        tokens, labels, positions = (np.zeros(size, dtype=np.int64) for _ in range(3))
        loss_mask, padding = np.zeros(size, dtype=np.float32), np.ones(size, dtype=bool)
        start = 0
        for document in self.packing.sequences[index]:
            ids = self._ids.document(document)[: size + 1]
            end = start + len(ids) - 1
            tokens[start:end], labels[start:end] = ids[:-1], ids[1:]
            loss_mask[start:end] = self._targets.document(document)[1 : len(ids)]
            positions[start:end] = np.arange(end - start)
            padding[start:end] = False
            start = end
        positions[start:] = np.arange(size - start)
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        return {key: torch.from_numpy(value) for key, value in {**arrays, "padding": padding}.items()}
