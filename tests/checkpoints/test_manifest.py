"""What a manifest holds a folder to: every byte of a training checkpoint, of other folders what people do not edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from btx_nemo.checkpoints.manifest import read_manifest, verify_checksums, write_manifest
from btx_nemo.errors import UserError


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_changed_description(tmp_path: Path, kind: str) -> None:
    (tmp_path / "model.json").write_text('{"top_k": 2}')
    write_manifest(tmp_path, kind=kind, digests={})
    assert verify_checksums(tmp_path, read_manifest(tmp_path)) == (1 if kind == "checkpoint" else 0)
    for text in ('{"top_k": 3}', '{"top_k": 32}'):  # of the same size, and of another
        (tmp_path / "model.json").write_text(text)
        if kind == "export":
            assert verify_checksums(tmp_path, read_manifest(tmp_path)) == 0
            continue
        with pytest.raises(UserError, match=r"model\.json: "):
            verify_checksums(tmp_path, read_manifest(tmp_path))
    if kind == "checkpoint":
        with pytest.raises(UserError, match=r"13 bytes, but manifest\.json says 12"):
            read_manifest(tmp_path)
