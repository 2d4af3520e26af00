"""Numbers computed apart from this project, in float64, from the papers' formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parents[2] / "vectors"


def golden(case: str) -> dict[str, Any]:
    """One case, e.g. "btx.top2_gates": inputs, expected, atol."""
    return json.loads((_FOLDER / f"{case.split('.')[0]}.json").read_text())["cases"][case]
