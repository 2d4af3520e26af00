"""Imports and exports read back what they wrote: a wrong tensor or wrong logits leave nothing."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from btx_testing.commands import CommandServer
from btx_testing.mixing import SMALL
from btx_testing.models import make_model
from btx_testing.tensors import temporaries

from btx_nemo.checkpoints.safetensors_sink import SafetensorsSink
from btx_nemo.checkpoints.torch_dist_sink import DistSink
from btx_nemo.convert import check
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.errors import CheckFailed, UserError
from btx_nemo.families.source import open_source


def test_the_commands_say_what_was_verified(commands: CommandServer, tmp_path: Path) -> None:
    src = make_model(tmp_path / "src", "qwen3", **SMALL)
    ended = commands.run("import", f"in={src}", f"out={tmp_path / 'ckpt'}")
    assert ended.code == 0, ended.err
    assert "ckpt: verified: all 24 tensors read back equal; logits on the probe differ by at most " in ended.out
    ended = commands.run("export", f"in={tmp_path / 'ckpt'}", f"out={tmp_path / 'hf'}", "verify=tensors")
    assert ended.out.endswith("verified: all 24 tensors read back equal\n") and "qwen3, which computes" in ended.out
    ended = commands.run("export", f"in={tmp_path / 'ckpt'}", f"out={tmp_path / 'hf2'}", "verify=false")
    assert ended.code == 0 and "not verified: verify=false" in ended.out
    ended = commands.run(
        "export", "--no-verify", "--target", "mixtral", f"in={tmp_path / 'ckpt'}", f"out={tmp_path / 'x'}"
    )
    assert ended.code == 2 and "mixtral has no place for" in ended.err
    ended = commands.run(
        "export", f"in={tmp_path / 'ckpt'}", f"out={tmp_path / 'hf3'}", "--no-verify", "--target=qwen3"
    )
    assert ended.code == 0 and "not verified: verify=false" in ended.out
    ended = commands.run("import", f"in={src}", f"out={tmp_path / 'x'}", "verify=maybe")
    assert ended.code == 2 and "verify=maybe: unknown; known: true, false, tensors, logits" in ended.err


@pytest.mark.parametrize("which", ["import", "export"])
def test_a_tensor_that_was_written_wrong_leaves_nothing(
    tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make_model(tmp_path / "src", "olmo2", **SMALL)
    import_hf(src, tmp_path / "ckpt")
    sink, run = (DistSink, import_hf) if which == "import" else (SafetensorsSink, export_hf)
    given = src if which == "import" else tmp_path / "ckpt"
    write = sink.write

    def wrong(self, target: str, box: tuple, tensor: torch.Tensor) -> None:
        write(self, target, box, tensor + 1e-3 if "linear_fc2" in target or "down_proj" in target else tensor)

    monkeypatch.setattr(sink, "write", wrong)
    with pytest.raises(CheckFailed, match=r"2 of 25 tensors differ; the first is model.layers.0.mlp.down_proj.weight"):
        run(given, tmp_path / "out")
    assert not (tmp_path / "out").exists() and temporaries(tmp_path) == []


@pytest.mark.parametrize("lacks", ["result", "source"])
def test_a_tensor_of_one_side_alone_is_told(tmp_path: Path, lacks: str) -> None:
    """But where the target was not to be exact, they are not compared."""
    src = make_model(tmp_path / "src", "olmo2", **SMALL)
    whole = open_source(src, "src")
    first, *names = sorted(whole.layout())
    part = types.SimpleNamespace(folder=src, layout=lambda: {name: whole.layout()[name] for name in names})
    pair = (whole, part) if lacks == "result" else (part, whole)
    which = "source" if lacks == "result" else "result"
    with pytest.raises(CheckFailed, match=f"the first is {first}, which only the {which} has"):
        check._check_tensors(*pair, exact=True)
    assert "tensors not compared" in check._check_tensors(*pair, exact=False)


def test_logits_that_differ_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors alone cannot tell a wrong epsilon."""
    from btx_nemo.convert import to_megatron

    src = make_model(tmp_path / "src", "llama-bias", **SMALL)
    save = to_megatron.save_model_config

    def wrong(config, folder: Path) -> None:
        import dataclasses

        save(dataclasses.replace(config, norm_eps=1e-1), folder)

    monkeypatch.setattr(to_megatron, "save_model_config", wrong)
    assert "tensors read back equal" in import_hf(src, tmp_path / "tensors")
    with pytest.raises(CheckFailed, match="the result's logits differ by"):
        import_hf(src, tmp_path / "out", verify="true")
    assert not (tmp_path / "out").exists() and temporaries(tmp_path) == []


def test_the_bound_and_what_cannot_be_compared_are_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = make_model(tmp_path / "src", "llama-bias", **SMALL)
    assert "logits not compared, since bfloat16 rounds the weights" in import_hf(
        src, tmp_path / "narrow", dtype="bfloat16", verify="true"
    )
    monkeypatch.setattr(check, "LARGEST", 1000)
    line = import_hf(src, tmp_path / "large", verify="true")
    assert "parameters are over 1,000 (verify=logits does it)" in line
    assert "logits on the probe differ by at most" in import_hf(src, tmp_path / "asked", verify="logits")
    with pytest.raises(UserError, match="verify=on: unknown"):
        export_hf(tmp_path / "large", tmp_path / "x", verify="on")
