"""Training on conversations by the command: resumed to the bit, and every loss that it tells is of targets alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from btx_testing.chats import chat_domain
from btx_testing.commands import CommandServer
from btx_testing.runs import TinyWorld, metrics, saved_step, weights

from btx_nemo.data.indexed import open_indexed


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chats")
    for number, (domain, count) in enumerate((("math", 30), ("code", 20))):
        chat_domain(root, domain, count, seed=number, turns=2, words=2)
    return root / "data"


def arguments(world: TinyWorld, chats: Path, out: Path, *more: str) -> list[str]:
    sizes = ["data.seq_length=64", "global_batch_size=4", "micro_batch_size=2", "eval_batches=100", "log_every=1"]
    places = [f"init_from={world.dense}", f"data.path={chats}", f"out={out}"]
    return ["train", "--config-name", "tiny_sft", *places, *sizes, "checkpoint.every=3", *more]


def test_a_killed_run_ends_as_one_that_never_was(
    world: TinyWorld, chats: Path, commands: CommandServer, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended = commands.run(*arguments(world, chats, whole))
    assert ended.code == 0, ended.err
    assert "conversations" in ended.out + ended.err
    commands.start(*arguments(world, chats, killed)).kill_when(lambda: saved_step(killed) >= 3)
    again = commands.run(*arguments(world, chats, killed))
    assert again.code == 0, again.err
    assert weights(killed) == weights(whole)
    assert metrics(killed) == metrics(whole)
    losses = [record["loss"] for record in metrics(whole) if "loss" in record]
    assert len(losses) > 4 and losses[-1] < losses[0]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_answers_that_lie_behind_every_sequence_are_told_before_a_step(
    world: TinyWorld, chats: Path, commands: CommandServer, tmp_path: Path, split: str
) -> None:
    data = Path(shutil.copytree(chats, tmp_path / "data"))
    targets = data / "code" / f"{split}.targets.bin"
    targets.write_bytes(bytes(targets.stat().st_size))
    out = tmp_path / "run"
    ended = commands.run(*arguments(world, data, out))
    assert ended.code == 2 and ended.err.count("\n") == 1, ended.err
    assert f"{data / 'code' / split}: none of its" in ended.err and "data.seq_length=64" in ended.err
    assert not out.exists()


def test_the_validation_loss_is_the_mean_over_targets(
    world: TinyWorld, chats: Path, commands: CommandServer, tmp_path: Path
) -> None:
    """Of the whole validation set, however it is packed, against transformers on one conversation at a time."""
    from transformers import AutoModelForCausalLM

    ended = commands.run(*arguments(world, chats, tmp_path / "run", "epochs=null", "steps=0", "export=false"))
    assert ended.code == 0, ended.err
    told = metrics(tmp_path / "run")[0]["valid"]
    model = AutoModelForCausalLM.from_pretrained(world.dense, dtype=torch.float32, attn_implementation="eager").eval()
    for domain, loss in told.items():
        total, count = 0.0, 0.0
        ids, targets = (open_indexed(chats / domain / name) for name in ("valid", "valid.targets"))
        for one, mask in zip(ids.documents(), targets.documents()):
            tokens = torch.tensor(one[:65].astype("int64"))
            wanted = torch.tensor(mask[1:65].astype("float32"))
            with torch.no_grad():
                logits = model(tokens[None, :-1]).logits[0]
            losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
            total, count = total + float((losses * wanted).sum()), count + float(wanted.sum())
        assert loss == pytest.approx(total / count, rel=1e-5)
