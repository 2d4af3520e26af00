"""Packing: every conversation once and whole, none longer than it has to be; and the order of passes and samples."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from btx_testing.chats import chat_domain, packed_batch
from btx_testing.vectors import golden

from btx_nemo.data.indexed import open_indexed
from btx_nemo.data.order import Blend, Passes, sample_documents, sample_size
from btx_nemo.data.packing import pack


@pytest.mark.parametrize("seed", range(4))
def test_every_document_is_in_one_sequence_that_has_room_for_it(seed: int) -> None:
    rng, size = np.random.default_rng(seed), 64
    lengths = rng.integers(2, 90, 300).astype(np.int32)
    documents = np.sort(rng.permutation(300)[:200])
    packing = pack(lengths, documents, size)
    assert sorted(number for sequence in packing.sequences for number in sequence) == documents.tolist()
    places = np.minimum(lengths - 1, size)
    loads = [sum(places[sequence]) for sequence in packing.sequences]
    assert max(loads) <= size and sum(loads) == packing.places
    assert packing.cut == (lengths[documents] - 1 > size).sum()
    assert packing.lost == np.maximum(lengths[documents] - 1 - size, 0).sum()
    # best-fit decreasing never needs more than 11/9 of the least possible, plus one
    assert len(packing.sequences) <= -(-packing.places // size) * 11 / 9 + 1
    assert packing == pack(lengths, documents, size)


def test_best_fit_by_hand() -> None:
    packing = pack(np.array([6, 4, 7, 3, 5, 2]), np.arange(6), 9)  # places 5 3 6 2 4 1
    assert packing.sequences == [[2, 1], [0, 4], [3, 5]]


def test_a_packed_sequence_holds_each_conversation_as_it_is_alone(tmp_path: Path) -> None:
    data = chat_domain(tmp_path, "d", 40, turns=2)
    ids = list(open_indexed(data / "d/train").documents())
    targets = list(open_indexed(data / "d/train.targets").documents())
    size = max(map(len, ids)) + 20
    batch, found = packed_batch(data, "d", size), Counter[tuple[int, ...]]()
    assert batch["tokens"].shape[0] < len(ids)
    for row in range(batch["tokens"].shape[0]):
        positions, padding = batch["position_ids"][row], batch["padding"][row]
        starts = [*(positions == 0).nonzero().flatten().tolist(), size]
        for start, end in pairwise(starts):
            assert positions[start:end].tolist() == list(range(end - start))
            if padding[start]:
                assert padding[start:].all() and not batch["loss_mask"][row, start:].any() and end == size
                continue
            whole = [*batch["tokens"][row, start:end].tolist(), int(batch["labels"][row, end - 1])]
            assert batch["labels"][row, start:end].tolist() == whole[1:]
            number = next(i for i, one in enumerate(ids) if one.tolist() == whole)
            assert batch["loss_mask"][row, start:end].tolist() == targets[number][1:].tolist()
            found[tuple(whole)] += 1
    assert found == Counter(tuple(one.tolist()) for one in ids)


def test_a_conversation_longer_than_a_sequence_loses_its_end(tmp_path: Path) -> None:
    data = chat_domain(tmp_path, "d", 5, turns=2)
    ids = list(open_indexed(data / "d/train").documents())
    batch = packed_batch(data, "d", 16)
    rows = {tuple(row.tolist()) for row in batch["tokens"]}
    assert rows == {tuple(one[:16].tolist()) for one in ids} and not batch["padding"].any()


def test_the_stratified_sample_of_bar() -> None:
    case = golden("bar.stratified_sample")
    for count, expected in zip(case["inputs"]["N"], case["expected"]["n"], strict=True):
        assert sample_size(count, 0.05) == expected
        chosen = sample_documents(count, 0.05, "math")
        assert len(set(chosen.tolist())) == expected and chosen.min() >= 0 and chosen.max() < count
        assert chosen.tolist() == sorted(chosen) == sample_documents(count, 0.05, "math").tolist()
    assert sample_documents(1000, 0.05, "math").tolist() != sample_documents(1000, 0.05, "code").tolist()
    assert sample_documents(7, 1.0, "x").tolist() == list(range(7))
    assert all(sample_size(count, 0.1) == -(-count // 10) for count in range(1, 200)), "no rounding of 0.1 shows"


def test_passes_have_every_item_once_each_in_another_order() -> None:
    passes = Passes([list("abc"), list("defgh")], 3, seed=(1,))
    assert len(passes) == 24
    orders = ["".join(passes[8 * number + place] for place in range(8)) for number in range(3)]
    assert all(sorted(order) == list("abcdefgh") for order in orders) and len(set(orders)) == 3
    assert [passes[i] for i in (20, 3, 11)] == ["".join(orders)[i] for i in (20, 3, 11)], "any place, in any order"
    other = Passes([list("abc"), list("defgh")], 3, seed=(2,))
    assert [other[i] for i in range(24)] != [passes[i] for i in range(24)]
    for place in range(24):
        which, dataset, item = passes.origin(place)
        assert dataset is passes.datasets[which] and dataset[item] == passes[place]


def test_a_blend_takes_items_by_weight_and_no_more_than_it_says() -> None:
    blend = Blend([0.7, 0.2, 0.1], 50)
    counts = [blend.count(number) for number in range(3)]
    assert counts == [35, 10, 5]
    blend.datasets = [
        Passes([[{"id": f"{name}{i}"} for i in range(count)]], 1, seed=(0,)) for name, count in zip("abc", counts)
    ]
    items = [blend[i]["id"] for i in range(50)]
    assert all("abc".index(blend[i]["id"][0]) == blend[i]["dataset_id"] == blend.origin(i)[0] for i in range(50))
    assert len(set(items)) == 50
    for end in range(5, 50):
        assert abs(sum(item[0] == "a" for item in items[:end]) - 0.7 * end) <= 1


def test_one_dataset_needs_no_label() -> None:
    """Neither in passes nor in a blend: a run of one domain has no table of losses by domain."""
    passes = Passes([[{"id": 0}, {"id": 1}]], 2, seed=(1,))
    blend = Blend([1.0], 4)
    blend.datasets = [passes]
    assert [set(item) for item in (passes[0], blend[0])] == [{"id"}] * 2


def test_tensors_are_what_the_model_takes(tmp_path: Path) -> None:
    batch = packed_batch(chat_domain(tmp_path, "d", 4), "d", 32)
    assert {key: value.dtype for key, value in batch.items()} == {
        "tokens": torch.int64, "labels": torch.int64, "position_ids": torch.int64,
        "loss_mask": torch.float32, "padding": torch.bool,
    }  # fmt: skip
