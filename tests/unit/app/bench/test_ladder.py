"""The search for the highest sustained rate."""

from __future__ import annotations

import pytest

from qim.app.bench.ladder import RESOLUTION, RateLadder


def climb(capacity: float, *, first: float = 1000.0, most: float = 1e6) -> tuple[float, list[float]]:
    """(what is found, every rate that was tried) on a system that sustains up to `capacity`."""
    ladder = RateLadder(first, most)
    tried: list[float] = []
    while (rate := ladder.next_rate()) is not None:
        tried.append(rate)
        assert len(tried) < 50
        ladder.judged(rate, sustained=rate <= capacity)
    return ladder.best, tried


@pytest.mark.parametrize("capacity", [1000.0, 1001.0, 4321.0, 13_000.0, 400.0, 3.0])
def test_it_ends_just_below_the_capacity(capacity: float) -> None:
    found, tried = climb(capacity)
    assert capacity / RESOLUTION <= found <= capacity
    assert len(tried) < 20


def test_nothing_is_sustained() -> None:
    found, tried = climb(0.0)
    assert found == 0.0
    assert min(tried) >= 1


def test_it_goes_no_higher_than_told() -> None:
    found, tried = climb(1e9, most=5000.0)
    assert found == 5000.0
    assert max(tried) == 5000.0
