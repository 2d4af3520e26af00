"""Options of sbatch that a pipeline's jobs cannot have, and those that are joined to its own."""

from __future__ import annotations

import pytest

from btx_nemo.errors import UserError
from btx_nemo.launch.options import check_options, without_dependencies


@pytest.mark.parametrize(
    "option",
    [
        *("--array=0-3", "--arr=1", "--wrap=x", "--test-only", "--parsable", "--wait", "--output=x", "--job-name=x"),
        *("--export=NONE", "--version", "-a", "-a1", "-W", "-o", "-J", "-dafterok:1", "-d", "--dependency"),
        *("--dependency=afterok:1?afterok:2", "--dependency=afterok:$(x)", "--dep=expand:1;2"),
    ],
)
def test_refused(option: str) -> None:
    with pytest.raises(UserError, match=r"^mix: sbatch option "):
        check_options("mix", ["--partition=gpu", option])


def test_taken() -> None:
    options = [
        "--partition=gpu",
        "-p",
        "gpu",
        "-pgpu",
        "--comment=a",
        "--exclusive",
        "--export-file=x",
        "--wait-all-nodes=1",
    ]
    check_options("mix", [*options, "--dependency=singleton", "--dep=afterok:1:2_3,after:4+5"])
    kept, waits = without_dependencies([*options, "--dep=afterok:1"])
    assert (kept, waits) == (options, ["afterok:1"])
