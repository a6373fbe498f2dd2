"""The beginning of a recorded day while a worker of every role is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qim.app.cli import main

DAY = Path(__file__).parents[3] / "data" / "irc" / "2006-06-01.jsonl"


@pytest.mark.timeout(180)
def test_a_day_with_kills_of_every_role(tmp_path: Path) -> None:
    arguments = ["replay", str(DAY), "--limit", "600", "--chaos", "--kills", "1", "--report", str(tmp_path)]
    assert main(arguments) == 0
    report = json.loads((tmp_path / DAY.stem / "report.json").read_text())
    assert {kill["role"] for kill in report["kills"]} == {"gateway", "writer", "fanout", "mailbox"}
    assert all(kill["unacknowledged_sends"] and kill["dispatches_above_w"] for kill in report["kills"])
