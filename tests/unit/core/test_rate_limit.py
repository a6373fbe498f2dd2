"""Token buckets in GCRA form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.core.rate_limit import RateLimiter


def test_a_burst_then_one_per_interval() -> None:
    limiter = RateLimiter(per_ms=100, burst=3)
    for _ in range(3):
        assert limiter.wait_ms("k", 1000) == 0
        limiter.take("k", 1000)
    assert limiter.wait_ms("k", 1000) == 100
    assert limiter.wait_ms("k", 1100) == 0
    assert limiter.wait_ms("other", 1000) == 0


def test_asking_takes_nothing() -> None:
    limiter = RateLimiter(per_ms=100, burst=1)
    assert [limiter.wait_ms("k", 0) for _ in range(5)] == [0] * 5


def test_the_key_unused_for_longest_is_forgotten() -> None:
    limiter = RateLimiter(per_ms=100, burst=1, keys_max=2)
    for key in ("a", "b", "a", "c"):
        limiter.take(key, 0)
    assert len(limiter) == 2
    assert limiter.wait_ms("b", 0) == 0
    assert limiter.wait_ms("a", 0) > 0


@pytest.mark.parametrize(("per_ms", "burst"), [(0, 1), (100, 0)])
def test_a_limit_of_nothing_is_a_mistake(per_ms: float, burst: int) -> None:
    with pytest.raises(ValueError, match="rate limit"):
        RateLimiter(per_ms=per_ms, burst=burst)


@given(st.lists(st.floats(0, 500), min_size=1, max_size=200), st.integers(1, 10))
def test_never_more_than_burst_plus_rate(gaps_ms: list[float], burst: int) -> None:
    limiter = RateLimiter(per_ms=100, burst=burst)
    now_ms, taken = 0.0, 0
    for gap_ms in gaps_ms:
        now_ms += gap_ms
        if limiter.wait_ms("k", now_ms) == 0:
            limiter.take("k", now_ms)
            taken += 1
    assert taken <= burst + now_ms / 100 + 1e-6
