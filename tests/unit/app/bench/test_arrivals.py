"""Arrivals of an open loop."""

from __future__ import annotations

from itertools import pairwise

import pytest

from qim.app.bench.arrivals import Arrivals


def test_the_mean_rate_is_kept_however_often_it_is_asked() -> None:
    rarely = Arrivals(1000, start_s=5.0, seed=1)
    often = Arrivals(1000, start_s=5.0, seed=1)
    at_once = rarely.due(15.0)
    in_steps = [due_s for step in range(1, 1001) for due_s in often.due(5.0 + step / 100)]
    assert at_once == in_steps
    assert len(at_once) == pytest.approx(10_000, rel=0.05)
    assert at_once == sorted(at_once)
    assert at_once[0] > 5.0


def test_what_was_due_comes_once() -> None:
    arrivals = Arrivals(100, start_s=0.0, seed=7)
    assert arrivals.due(1.0)
    assert arrivals.due(1.0) == []


def test_gaps_vary_as_those_of_independent_people() -> None:
    times = Arrivals(100, start_s=0.0, seed=3).due(100.0)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="not positive"):
        Arrivals(0, start_s=0.0, seed=1)
