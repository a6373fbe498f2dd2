"""Traffic beside a large message."""

from __future__ import annotations

from qim.app.bench.large import Span, beside


def test_traffic_is_divided_by_when_it_was_due() -> None:
    due_s = [0.5, 3.0, 1.0, 1.5, 2.0, 9.0]
    latency_ms = [1.0, 2.0, 30.0, 40.0, 50.0, 3.0]
    inside, outside = beside(due_s, latency_ms, [Span(1.0, 2.0)])
    assert (inside.samples, inside.p50_ms, inside.max_ms) == (3, 40.0, 50.0)
    assert (outside.samples, outside.max_ms) == (3, 3.0)


def test_without_a_message_everything_is_outside() -> None:
    inside, outside = beside([1.0], [7.0], [])
    assert (inside.samples, outside.samples) == (0, 1)


def test_a_span_knows_its_length() -> None:
    assert Span(1.0, 1.5).ms == 500.0
