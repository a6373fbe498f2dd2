"""Vectors of bytes that may never change (DESIGN-data §2); computed apart from the code they pin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1] / "golden"


def golden(name: str) -> Any:
    """Content of tests/golden/<name>.json; bytes are hex."""
    return json.loads((_FOLDER / f"{name}.json").read_text())
