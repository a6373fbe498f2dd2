"""Part `push` on a few receivers: gateway, floor and driver in their processes."""

from __future__ import annotations

from qim.app.bench.push import run_push


def test_gateway_and_floor_are_measured_in_turns() -> None:
    lines: list[str] = []
    report = run_push(0.2, lines.append, receivers=8)
    assert len(lines) == 2
    assert not report.failures
    for figure in report.figures:
        assert figure.value > 0
        assert figure.ratio is not None
        assert figure.ratio > 0
    assert len(report.details["single"]) >= 1
    assert len(report.details["coalesced"]) >= 1
