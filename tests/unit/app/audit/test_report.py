from __future__ import annotations

from qim.app.audit.report import FINDINGS_KEPT_MAX, FINDINGS_SHOWN_MAX, AuditReport, Orphan


def test_nothing_found_passes_and_names_every_kind() -> None:
    report = AuditReport()
    report.examined["commits"] = 7
    assert report.passed()
    text = report.text()
    assert text.endswith("PASSED")
    assert all(orphan.value in text for orphan in Orphan)
    found = report.as_json()
    assert (found["passed"], found["examined"]) == (True, {"commits": 7})
    assert set(found["found"].values()) == {0}


def test_all_findings_count_and_the_first_are_told() -> None:
    report = AuditReport()
    for number in range(FINDINGS_KEPT_MAX + 5):
        report.add(Orphan.ENTRY_MISSING, f"user {number}", "gone")
    assert not report.passed()
    assert len(report.findings) == FINDINGS_KEPT_MAX
    assert report.as_json()["found"]["mailbox entry missing"] == FINDINGS_KEPT_MAX + 5
    text = report.text()
    assert f"user {FINDINGS_SHOWN_MAX - 1}: gone" in text
    assert f"user {FINDINGS_SHOWN_MAX}: gone" not in text
    assert f"{FINDINGS_KEPT_MAX + 5 - FINDINGS_SHOWN_MAX} findings more" in text
    assert text.endswith("FAILED")
