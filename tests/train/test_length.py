"""How long a run is: steps, or what follows from tokens or epochs; and what it sees in that time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing.chats import chat_domain
from btx_testing.runs import TinyWorld, copy_domain

from btx_nemo.config.load import load
from btx_nemo.config.schema import TrainConfig
from btx_nemo.config.training import read_train_config
from btx_nemo.data.datasets import build_datasets
from btx_nemo.data.indexed import open_indexed
from btx_nemo.data.order import sample_documents
from btx_nemo.data.sampler import batches
from btx_nemo.errors import UserError
from btx_nemo.train.contents import contents_of
from btx_nemo.train.length import with_steps

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chats")
    for number, (domain, count) in enumerate((("math", 37), ("code", 8))):
        chat_domain(root, domain, count, seed=number)
    return root / "data"


def config(data: Path, *overrides: str, name: str = "tiny_mix") -> TrainConfig:
    length = [] if any(o.startswith("steps=") for o in overrides) else ["steps=null"]
    sizes = ["data.seq_length=32", "global_batch_size=8", f"data.path={data}", *length]
    return read_train_config(load("train", name, [*sizes, *overrides]), name)


def test_exactly_one_length_is_given(world: TinyWorld) -> None:
    for overrides, given in ((["steps=5", "tokens=9"], "steps and tokens"), (["tokens=9", "epochs=1"], "tokens and ")):
        with pytest.raises(UserError, match=f"tiny_mix: {given}.*: give one of steps, tokens and epochs"):
            config(world.data, *overrides)
    with pytest.raises(UserError, match="tiny_mix: steps is required; give steps=VALUE, tokens=VALUE or epochs="):
        config(world.data)


def test_steps_follow_from_tokens(world: TinyWorld) -> None:
    assert with_steps(config(world.data, "steps=7")).steps == 7
    assert with_steps(config(world.data, "tokens=2560")).steps == 10
    assert with_steps(config(world.data, "tokens=2561")).steps == 11
    assert with_steps(config(world.data, "tokens=1e9")).steps == 3906250
    assert with_steps(config(world.data, "tokens=1")).steps == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tokens=0"], "tokens=0.0: must be a positive number"),
        (["epochs=-1"], "epochs=-1.0: must be a positive number"),
        (["epochs=inf"], "epochs=inf: must be a positive number"),
        (["epochs=1", "data.blend.math=1"], "epochs=1.0 and data.blend: every sequence comes as often"),
        (["epochs=1", "data.sample=0"], "data.sample=0.0: must be above 0 and at most 1"),
        (["epochs=1", "data.seq_length=1000000"], "tokens are less than a sequence of data.seq_length=1000000"),
        (["epochs=1", "domain=law"], "no domain 'law'"),
    ],
)
def test_a_length_that_cannot_be(world: TinyWorld, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_steps(config(world.data, *overrides))


def seen(settings: TrainConfig, out: Path) -> Counter[tuple[int, ...]]:
    """Every sequence that the run trains on, as it trains on them."""
    contents = contents_of(settings)
    train, _ = build_datasets(
        Path(settings.data.path),
        dict.fromkeys(contents, 1.0),
        seq_length=settings.data.seq_length,
        train_samples=settings.steps * settings.global_batch_size,
        seed=settings.seed,
        cache_dir=out,
        whole_passes=settings.epochs is not None,
        sample=settings.data.sample,
    )
    size = settings.global_batch_size
    stream = batches(train, consumed_samples=0, micro_batch_size=size, dp_rank=0, dp_size=1, global_batch_size=size)
    rows = [tuple(row.tolist()) for _ in range(settings.steps) for row in next(stream)["tokens"]]
    return Counter(rows)


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_epochs_see_every_sequence_as_often(world: TinyWorld, chats: Path, tmp_path: Path, kind: str) -> None:
    settings = with_steps(config(world.data if kind == "text" else chats, "epochs=2"))
    contents = contents_of(settings)
    sequences = sum(content.sequences for content in contents.values())
    assert {content.kind for content in contents.values()} == {kind} and len(contents) == 2
    assert settings.steps == -(-2 * sequences // 8)
    once = seen(with_steps(config(Path(settings.data.path), "epochs=1", "global_batch_size=1")), tmp_path)
    found = seen(settings, tmp_path)
    assert sum(once.values()) == sequences
    twice = Counter({row: 2 * count for row, count in once.items()})
    assert not twice - found, "each sequence twice; the last step is filled up"
    assert sum((found - twice).values()) == settings.steps * 8 - 2 * sequences


def test_a_stratified_sample_is_trained_on_and_nothing_else(world: TinyWorld, chats: Path, tmp_path: Path) -> None:
    settings = with_steps(config(chats, "epochs=1", "data.sample=0.05"))
    assert {domain: content.documents for domain, content in contents_of(settings).items()} == {"math": 2, "code": 1}
    words = {int(token) for row in seen(settings, tmp_path / "chats") for token in row}
    allowed = {0}
    for domain, count in (("math", 37), ("code", 8)):
        file = open_indexed(chats / domain / "train")
        allowed |= {int(t) for n in sample_documents(count, 0.05, domain) for t in file.document(n)}
    assert words <= allowed

    text = config(world.data, "steps=3", "data.sample=0.3", "domain=math")
    file = open_indexed(world.data / "math/train")
    chosen = [file.document(n) for n in sample_documents(len(file.lengths), 0.3, "math")]
    assert 0 < len(chosen) < len(file.lengths)
    everything = b"".join(document.astype("int64").tobytes() for document in chosen * 2)
    for row in seen(text, tmp_path / "text"):
        pieces = torch.tensor(row).numpy()
        half = len(pieces) // 2  # a sequence may run over one border between documents
        assert any(part.tobytes() in everything for part in (pieces[:half], pieces[half:]))


def test_a_blend_of_chats_follows_the_weights(chats: Path, tmp_path: Path) -> None:
    found = {}
    for name, weights in (("even", {"math": 1, "code": 1}), ("math", {"math": 9, "code": 1})):
        train, _ = build_datasets(
            chats, weights, seq_length=32, train_samples=80, cache_dir=tmp_path / name, vocab_size=257
        )
        own = chat_rows(chats, "code")
        found[name] = sum(tuple(train[i]["tokens"].tolist()) in own for i in range(80))
    assert found == {"even": 40, "math": 8}


def chat_rows(chats: Path, domain: str) -> set[tuple[Any, ...]]:
    from btx_testing.chats import packed_batch

    return {tuple(row.tolist()) for row in packed_batch(chats, domain, 32)["tokens"]}


def test_text_and_chats_come_together_in_whole_passes_alone(world: TinyWorld, chats: Path, tmp_path: Path) -> None:
    import shutil

    both = tmp_path / "data"
    shutil.copytree(chats, both)
    copy_domain(world.data / "math", both / "text")
    with pytest.raises(UserError, match="text and chats cannot be weighed against each other"):
        build_datasets(both, {"math": 1, "text": 1}, seq_length=32, train_samples=4, cache_dir=tmp_path / "c")
    train, _ = build_datasets(
        both, {"math": 1, "text": 1}, seq_length=32, train_samples=40, cache_dir=tmp_path / "c", whole_passes=True
    )
    batch = next(batches(train, consumed_samples=0, micro_batch_size=40, dp_rank=0, dp_size=1, global_batch_size=40))
    text = batch["dataset_id"] == 1
    assert text.any() and not text.all() and not batch["padding"][text].any() and batch["padding"][~text].any()


def test_document_masks_of_text_start_positions_again(world: TinyWorld, tmp_path: Path) -> None:
    train, valid = build_datasets(
        world.data, {"math": 1}, seq_length=64, train_samples=300, cache_dir=tmp_path, document_mask=True
    )
    borders = 0
    for item in [*(train[i] for i in range(300)), *(valid["math"][i] for i in range(len(valid["math"])))]:
        ends = (item["tokens"] == 0).nonzero().flatten().tolist()
        start = 0
        for end in [*ends, 63]:
            assert item["position_ids"][start : end + 1].tolist() == list(range(end + 1 - start))
            start = end + 1
        expected = torch.ones(64)
        expected[ends] = 0  # what follows the end of a document is another's
        assert torch.equal(item["loss_mask"], expected)
        borders += len(ends)
    assert borders > 0
