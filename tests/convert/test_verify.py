"""verify says no to what differs and yes to what does not, and says where."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from btx_testing.mixing import SMALL, add_tokenizer, make_models
from btx_testing.models import make_llama, make_mixtral
from btx_testing.tensors import load_folder
from safetensors.torch import save_file

from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.convert.verify import compare_logits, verify
from btx_nemo.errors import CheckFailed, UserError
from btx_nemo.mix.run import run_mix


def changed_copy(source: Path, out: Path, name: str, index: tuple[int, ...], value: float) -> Path:
    """A Hugging Face folder in which one number is another."""
    out.mkdir()
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_folder(source)
    tensors[name][index] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("make", [make_llama, make_mixtral])
def test_a_folder_equals_its_import(tmp_path: Path, make, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make(tmp_path / "hf", **SMALL)
    import_hf(hf, tmp_path / "run" / "checkpoints" / "step_00000001")
    (tmp_path / "run" / "latest").write_text("step_00000001\n")
    verify(hf, tmp_path / "run", tolerance=1e-4)
    output = capsys.readouterr().out
    assert f"tensors: all {len(load_folder(hf))} equal\n" in output
    assert "same next token: 100 %" in output and "(transformers)" in output and "(Megatron-Core)" in output


def test_a_folder_equals_itself_exactly(tmp_path: Path) -> None:
    hf = make_llama(tmp_path / "hf", **SMALL)
    verify(hf, hf, tolerance=0.0)


def test_one_weight_off_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, name = make_llama(tmp_path / "hf", **SMALL), "model.layers.1.mlp.down_proj.weight"
    before = float(load_folder(hf)[name][3, 5])
    other = changed_copy(hf, tmp_path / "other", name, (3, 5), before + 0.25)
    import_hf(other, tmp_path / "ckpt")
    for wrong in (other, tmp_path / "ckpt"):
        with pytest.raises(
            CheckFailed, match=r"logits differ by \S+ at sequence \d+, position \d+, token id \d+, over"
        ):
            verify(hf, wrong, tolerance=1e-4)
        assert f"tensors: 1 of 21 differ; the first is {name}, by at most 0.25, at [3, 5]" in capsys.readouterr().out
    verify(hf, other, tolerance=10.0)


def test_the_first_of_several_is_the_model_s_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_llama(tmp_path / "a", seed=1, **SMALL), make_llama(tmp_path / "b", seed=2, **SMALL)
    with pytest.raises(CheckFailed):
        verify(a, b, tolerance=1e-4)
    difference = (load_folder(a)["model.embed_tokens.weight"] - load_folder(b)["model.embed_tokens.weight"]).abs()
    assert f"21 of 21 differ; the first is model.embed_tokens.weight, by at most {difference.max():.3g}" in (
        capsys.readouterr().out
    )


def test_dtypes_are_named_and_compared_by_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = make_llama(tmp_path / "narrow", dtype=torch.bfloat16, **SMALL)
    import_hf(narrow, tmp_path / "wide", dtype="float32")
    verify(narrow, tmp_path / "wide", tolerance=1e-4)
    assert "tensors: all 21 equal (bfloat16 against float32)" in capsys.readouterr().out


def test_a_mixture_of_copies_equals_its_seed_by_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_models(tmp_path, "math")
    for file in ("model.safetensors", "config.json"):
        (tmp_path / "math" / file).write_bytes((tmp_path / "seed" / file).read_bytes())
    run_mix(config)
    verify(tmp_path / "seed", tmp_path / "mix", tolerance=1e-4)
    assert "not compared: " in capsys.readouterr().out


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_over_any_tolerance(tmp_path: Path, value: float) -> None:
    hf = make_llama(tmp_path / "hf", **SMALL)
    bad = changed_copy(hf, tmp_path / "bad", "model.norm.weight", (2,), value)
    for pair in ((hf, bad), (bad, hf), (bad, bad)):
        with pytest.raises(CheckFailed, match=r"differ by (nan|inf)"):
            verify(*pair, tolerance=1e30)


def test_the_place_of_the_largest_difference() -> None:
    a = torch.randn(2, 5, 7)
    b = a.clone()
    b[1, 3, 4] += 2
    b[0, 0, 0] -= 1
    found = compare_logits(a, b)
    assert found.at == (1, 3, 4) and found.largest == pytest.approx(2) and found.mean == pytest.approx(3 / 70)
    b[0, 2, 6] = math.nan
    found = compare_logits(a, b)
    assert found.at == (0, 2, 6) and math.isnan(found.largest)


def test_a_failure_that_rounding_can_explain_says_so(tmp_path: Path) -> None:
    a = make_llama(tmp_path / "a", **SMALL)
    name = "model.layers.1.mlp.down_proj.weight"
    value = float(load_folder(a)[name][3, 5])
    near = changed_copy(a, tmp_path / "near", name, (3, 5), value + 1e-6)
    far = changed_copy(a, tmp_path / "far", name, (3, 5), value + 0.1)
    with pytest.raises(CheckFailed, match=r"over the tolerance of 1e-12, but only \S+ of the largest logit"):
        verify(a, near, tolerance=1e-12)
    with pytest.raises(CheckFailed, match=r"over the tolerance of 1e-12$"):
        verify(a, far, tolerance=1e-12)


def test_different_vocabularies_are_refused(tmp_path: Path) -> None:
    a, b = make_llama(tmp_path / "a", **SMALL), make_llama(tmp_path / "b", **{**SMALL, "vocab_size": 64})
    with pytest.raises(UserError, match=r"b: vocab_size=64 but .*a has 96"):
        verify(a, b, tolerance=1e-4)
    c = make_llama(tmp_path / "c", **SMALL)
    add_tokenizer(a)
    add_tokenizer(c, w5=6, w6=5)
    with pytest.raises(UserError, match=r"c/tokenizer.json: token 'w5' is id 6 but id 5 in .*a"):
        verify(a, c, tolerance=1e-4)


def test_what_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    hf = make_llama(tmp_path / "hf", **SMALL)
    with pytest.raises(UserError, match="nowhere: no such folder"):
        verify(hf, tmp_path / "nowhere", tolerance=1e-4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        verify(tmp_path / "empty", hf, tolerance=1e-4)
    for tolerance in (-1.0, math.nan):
        with pytest.raises(UserError, match="tolerance="):
            verify(hf, hf, tolerance=tolerance)


def test_the_command_s_exit_codes(tmp_path: Path) -> None:
    from btx_nemo.cli import main

    a, b = make_llama(tmp_path / "a", seed=1, **SMALL), make_llama(tmp_path / "b", seed=2, **SMALL)
    main(["verify", str(a), str(a)])
    for other, code in ((b, 1), (tmp_path / "nowhere", 2)):
        with pytest.raises(SystemExit) as stopped:
            main(["verify", str(a), str(other)])
        assert stopped.value.code == code
