"""Hub ids: what is in the hub's cache is used without a network, and a missing folder is told from a model."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from btx_testing.mixing import make_models
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.checkpoints.hub import local_folder
from btx_nemo.errors import UserError
from btx_nemo.mix.run import run_mix


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub is not reachable; its cache is a folder of the test's."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path / "cache"), raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def cached(cache: Path, folder: Path, name: str, commit: str = "0" * 40) -> None:
    """Puts a folder into the cache as a model that was downloaded."""
    repository = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_a_cached_model_mixes_like_its_folder(tmp_path: Path, offline: Path) -> None:
    config = make_models(tmp_path, "math")
    run_mix(config)
    cached(offline, tmp_path / "math", "some-org/math-7B.v1")
    run_mix(dataclasses.replace(config, experts={"math": "some-org/math-7B.v1"}, out=str(tmp_path / "mix2")))
    assert same_bits(load_folder(tmp_path / "mix"), load_folder(tmp_path / "mix2"))
    with pytest.raises(UserError, match=r"cannot be reached"):
        local_folder("some-org/math-7B.v1@v2")


def test_a_missing_folder_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for place in ("runs/math", "/nowhere/math", "nowhere", "a/b/c", "./org/name", str(tmp_path / "x")):
        with pytest.raises(UserError, match="no such folder; give a Hugging Face folder"):
            local_folder(place)
    with pytest.raises(UserError, match=r"org/name: no such folder here, and https://.* cannot be reached"):
        local_folder("org/name")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: no such folder"):
        local_folder("file")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepositoryNotFoundError", "no such model on https://.* that you may see"),
        ("GatedRepoError", "is gated; accept its terms at"),
        ("RevisionNotFoundError", "has no revision 'v3'"),
        ("RuntimeError", r"download from https://.* failed \(RuntimeError: reset by peer\)"),
    ],
)
def test_what_the_hub_says_is_one_line(monkeypatch: pytest.MonkeyPatch, error: str, message: str) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, error, RuntimeError)

    def fail(*_: object, **__: object) -> None:
        raised = kind.__new__(kind)
        Exception.__init__(raised, "reset by peer\nmore")
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=message) as caught:
        local_folder("org/name@v3")
    assert "\n" not in str(caught.value)


def test_bins_are_asked_for_only_where_there_are_no_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(any(pattern.endswith(".bin") for pattern in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    local_folder("org/name")
    local_folder("org/name", allow_bin=True)
    (tmp_path / "model.safetensors").touch()
    local_folder("org/name", allow_bin=True)
    assert asked == [False, False, True, False]
