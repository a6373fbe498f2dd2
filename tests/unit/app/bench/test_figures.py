"""Figures beside floors, rivals and aims."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from qim.app.bench.figures import Figure, PartReport, number


def test_a_ratio_and_an_aim_for_it() -> None:
    figure = Figure(
        name="push", value=6.0, unit="µs", beside="bare write", beside_value=5.0, at_most=1.3, aim_is_ratio=True
    )
    assert figure.ratio == pytest.approx(1.2)
    assert figure.met is True
    assert figure.row() == ("push", "6 µs", "bare write", "5", "1.20 ×", "≤ 1.3 ×", "met")


@pytest.mark.parametrize(("value", "met"), [(4999.0, False), (5000.0, True)])
def test_an_aim_for_the_value_itself(value: float, met: bool) -> None:
    assert Figure(name="rate", value=value, unit="msg/s", beside="rival", beside_value=880, at_least=5000).met is met


def test_without_an_aim_nothing_is_judged() -> None:
    figure = Figure(name="cpu", value=1.0, unit="µs")
    assert figure.ratio is None
    assert figure.met is None
    assert figure.row() == ("cpu", "1 µs", "", "", "", "", "")


def test_a_ratio_that_cannot_be_made_meets_no_aim() -> None:
    assert Figure(name="x", value=1.0, unit="", at_most=2.0, aim_is_ratio=True).met is None


def test_the_report_is_a_table_and_a_file(tmp_path: Path) -> None:
    report = PartReport(
        part="push",
        conditions=["alone"],
        figures=[Figure(name="single", value=12.34, unit="µs", at_most=10)],
        details={"samples": [1, 2]},
        failures=["a message is missing"],
    )
    text = report.text()
    assert "--- push" in text
    assert "single" in text
    assert "missed" in text
    assert "FAILED: a message is missing" in text
    stored = orjson.loads(report.write(tmp_path).read_bytes())
    assert stored["part"] == "push"
    assert stored["figures"][0]["met"] is False
    assert stored["details"] == {"samples": [1, 2]}


def test_numbers_have_three_figures() -> None:
    assert [number(value) for value in (0.1234, 1.234, 12.34, 123.4, 12_345.6)] == [
        "0.123", "1.23", "12.3", "123", "12,346",
    ]  # fmt: skip
