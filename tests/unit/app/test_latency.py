"""Percentiles are values that were measured."""

from __future__ import annotations

from qim.app.latency import Latency, summarize


def test_nearest_rank() -> None:
    assert summarize([float(n) for n in range(1000, 0, -1)]) == Latency(1000, 500.0, 990.0, 999.0, 1000.0)


def test_one_sample_is_every_percentile() -> None:
    assert summarize([3.0]) == Latency(1, 3.0, 3.0, 3.0, 3.0)


def test_no_samples() -> None:
    assert summarize([]).samples == 0


def test_text_names_four_figures() -> None:
    assert summarize([1.0, 2.0]).text() == "1 / 2 / 2 / 2"
