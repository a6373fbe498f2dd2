"""The table names every fault, passed runs say so, and a kill that met nothing fails the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from qim.app.latency import summarize
from qim.app.replay.checker import Fault, Finding
from qim.app.replay.report import FINDINGS_SHOWN_MAX, DayReport, Kill

CLEAN = DayReport(
    day="2008-04-27",
    people=180,
    devices=212,
    messages=1958,
    deliveries=400_000,
    elapsed_s=41.0,
    ack=summarize([1.0, 2.0]),
    delivery=summarize([3.0]),
    findings=[],
    notes=["rate limits lifted for tenant replay"],
)
KILL = Kill(
    role="writer", process="writer-1", unacknowledged_sends=3, dispatches_above_w=2, at_s=1.5, recovery_ms=210.0
)


def test_a_clean_run_passes_and_shows_every_count() -> None:
    assert CLEAN.failures() == []
    text = CLEAN.text()
    assert "PASSED" in text
    assert "rate limits lifted" in text
    for fault in Fault:
        assert fault.value in text


def test_findings_fail_the_run_and_are_named() -> None:
    many = [Finding(Fault.LOST, "u1/phone", f"seq {n}") for n in range(FINDINGS_SHOWN_MAX + 5)]
    report = replace(CLEAN, findings=many)
    assert report.failures() == [f"lost: {len(many)}"]
    assert "u1/phone: seq 0" in report.text()
    assert "5 findings more" in report.text()


def test_kills_must_meet_something_and_recover() -> None:
    assert replace(CLEAN, kills=[KILL], kills_wanted=1).failures() == []
    idle = replace(KILL, dispatches_above_w=0)
    assert replace(CLEAN, kills=[idle], kills_wanted=1).failures() == ["the kill of writer-1 met nothing in flight"]
    dead = replace(KILL, recovery_ms=-1)
    assert replace(CLEAN, kills=[dead], kills_wanted=1).failures() == ["no recovery after the kill of writer-1"]
    assert replace(CLEAN, kills=[KILL], kills_wanted=2).failures() == ["only 1 of 2 kills happened"]


def test_the_file_holds_all_of_it(tmp_path: Path) -> None:
    report = replace(CLEAN, findings=[Finding(Fault.LEAKED, "u1/phone", "seq 3")], kills=[KILL], kills_wanted=1)
    report.write(tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["failures"] == ["leaked: 1"]
    assert stored["findings"] == [{"fault": "leaked", "where": "u1/phone", "what": "seq 3"}]
    assert stored["kills"][0]["process"] == "writer-1"
    assert stored["ack"]["p99_ms"] == 2.0
