from __future__ import annotations

from qim.app.replay.checker import Fault, Finding
from tests.chaos.faults import FAULTS
from tests.chaos.judge import Harm
from tests.chaos.table import NOT_RECOVERED, FaultResult, Recovery, text

GOOD = FaultResult(
    name="kill-writer",
    wanted=3,
    met=[4, 0, 1],
    recoveries=[Recovery(0.4, 0.5), Recovery(0.0, 0.1), Recovery(0.6, 0.9)],
    sent=100,
)


def test_a_row_tells_counts_and_times() -> None:
    assert GOOD.failures() == []
    rows = [line.split() for line in text([GOOD]).splitlines()]
    row = dict(
        zip(
            ["fault", "injected", "met", "back P50", "back", "P50", "max", *(harm.value for harm in Harm)],
            rows[1],
            strict=False,
        )
    )
    assert (row["fault"], row["injected"], row["met"], row["P50"], row["max"]) == (
        "kill-writer",
        "3",
        "2",
        "0.50",
        "0.90",
    )
    assert [row[harm.value] for harm in Harm] == ["0"] * len(Harm)
    assert rows[-1] == ["PASSED"]


def test_what_was_found_fails_the_row() -> None:
    bad = FaultResult(
        name="x",
        wanted=1,
        met=[1],
        recoveries=[Recovery(1.0, 1.0)],
        findings=[Finding(Fault.LOST, "bob/phone", "seq 7")],
    )
    assert bad.failures() == ["1 lost"]
    assert "bob/phone" in text([GOOD, bad])
    assert text([GOOD, bad]).endswith("FAILED")


def test_what_did_not_recover_is_stuck() -> None:
    bad = FaultResult(name="x", wanted=1, met=[1], recoveries=[NOT_RECOVERED])
    assert bad.failures() == ["1 stuck"]


def test_orphans_and_alarms_fail_a_row() -> None:
    bad = FaultResult(
        name="x", wanted=1, met=[1], recoveries=[Recovery(0.1, 0.1)], orphans=2, alarms=["writer-0: a = 1"]
    )
    assert bad.failures() == ["2 orphans", "1 alarms"]


def test_a_run_that_met_nothing_fails() -> None:
    assert FaultResult(name="x", wanted=2, met=[0, 0], recoveries=[Recovery(0.0, 0.0)] * 2).failures() == [
        "met nothing in flight"
    ]


def test_a_run_that_was_cut_short_fails() -> None:
    assert FaultResult(name="x", wanted=3, met=[1], recoveries=[Recovery(0.1, 0.1)]).failures() == ["1 of 3 injections"]


def test_the_plan_kills_at_least_a_hundred_times_and_does_the_rest_twenty_times() -> None:
    kills = [fault for fault in FAULTS if fault.name.startswith(("kill-", "crash-"))]
    assert sum(fault.times for fault in kills) >= 100
    assert {fault.times for fault in FAULTS} == {1, 20}
    long = {fault.name for fault in FAULTS if fault.times == 1}
    assert {
        name for name in long if not any(other.name != name and name.startswith(other.name) for other in FAULTS)
    } == set()
