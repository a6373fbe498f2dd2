from __future__ import annotations

from typing import Any

import pytest

from qim.runtime.backoff import Backoff


def _backoff(**changes: Any) -> Backoff:
    settings: dict[str, Any] = {
        "initial_ms": 50,
        "factor": 2,
        "max_ms": 300,
        "jitter_ratio": 0,
        "random_unit": lambda: 0.5,
        "alive_reset_ms": 5000,
    }
    return Backoff(**{**settings, **changes})


def test_delays_grow_to_the_bound() -> None:
    backoff = _backoff()
    assert [backoff.delay_ms() for _ in range(5)] == [50, 100, 200, 300, 300]


def test_a_long_run_starts_over_a_short_one_does_not() -> None:
    backoff = _backoff()
    assert [backoff.delay_after_run_ms(alive) for alive in (10, 10, 4999, 5000, 10)] == [50, 100, 200, 50, 100]


@pytest.mark.parametrize(("unit", "delay"), [(0.0, 35.0), (0.5, 50.0), (1.0, 65.0)])
def test_jitter_is_symmetric(unit: float, delay: float) -> None:
    assert _backoff(jitter_ratio=0.3, random_unit=lambda: unit).delay_ms() == pytest.approx(delay)


def test_reset() -> None:
    backoff = _backoff()
    backoff.delay_ms()
    backoff.reset()
    assert backoff.delay_ms() == 50


@pytest.mark.parametrize(
    "changes", [{"initial_ms": 0}, {"max_ms": 10}, {"factor": 0.5}, {"jitter_ratio": 1}, {"jitter_ratio": -0.1}]
)
def test_nonsense_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="backoff needs"):
        _backoff(**changes)
