"""First-level admission."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.gateway.admission import Admission, ConnectLimiter, RateLimiter, Refusal


def admission() -> Admission:
    return Admission(
        per_user=RateLimiter(per_ms=50, burst=40),
        per_sender_in_conversation=RateLimiter(per_ms=3000, burst=20),
        history=RateLimiter(per_ms=200, burst=5),
    )


def test_burst_then_rate() -> None:
    limiter = RateLimiter(per_ms=100, burst=3)
    for _ in range(3):
        assert limiter.wait_ms("a", 1000) == 0
        limiter.take("a", 1000)
    assert limiter.wait_ms("a", 1000) == 100
    assert limiter.wait_ms("a", 1040) == 60
    assert limiter.wait_ms("a", 1100) == 0
    assert limiter.wait_ms("b", 1000) == 0


def test_a_pause_refills_no_more_than_the_burst() -> None:
    limiter = RateLimiter(per_ms=100, burst=2)
    limiter.take("a", 0)
    taken = 0
    while limiter.wait_ms("a", 100_000) == 0:
        limiter.take("a", 100_000)
        taken += 1
    assert taken == 2


@given(st.lists(st.integers(0, 500), max_size=200), st.integers(1, 200), st.integers(1, 10))
def test_never_more_than_burst_and_rate(gaps: list[int], per_ms: int, burst: int) -> None:
    limiter = RateLimiter(per_ms=per_ms, burst=burst)
    now_ms = 0
    admitted: list[int] = []
    for gap in gaps:
        now_ms += gap
        wait_ms = limiter.wait_ms("a", now_ms)
        if wait_ms == 0:
            limiter.take("a", now_ms)
            admitted.append(now_ms)
        else:
            assert limiter.wait_ms("a", now_ms + wait_ms) == 0
    for first, start in enumerate(admitted):
        for last, end in enumerate(admitted[first:], first):
            assert last - first + 1 <= burst + (end - start) / per_ms


def test_keys_are_bounded_and_the_oldest_is_forgotten() -> None:
    limiter = RateLimiter(per_ms=1000, burst=1, keys_max=2)
    limiter.take("a", 0)
    limiter.take("b", 0)
    limiter.take("a", 1000)
    limiter.take("c", 1000)
    assert len(limiter) == 2
    assert limiter.wait_ms("b", 1000) == 0
    assert limiter.wait_ms("a", 1000) == 1000


def test_limits_make_sense() -> None:
    for per_ms, burst in ((0, 1), (-1, 1), (10, 0)):
        with pytest.raises(ValueError, match="positive interval"):
            RateLimiter(per_ms=per_ms, burst=burst)


def test_first_refusal_charges_nobody() -> None:
    judged = admission()
    for _ in range(20):
        assert judged.judge_send(b"ann", "dm:ann:bob", 0) is None
    for _ in range(5):
        assert judged.judge_send(b"ann", "dm:ann:bob", 0) == Refusal("per_sender_in_conversation_rate", 3000)
    for number in range(20):
        assert judged.judge_send(b"ann", f"g:{number}", 0) is None
    for _ in range(5):
        assert judged.judge_send(b"ann", "g:other", 0) == Refusal("per_user_msg_rate", 50)
    assert judged.judge_send(b"ann", "g:other", 50) is None
    assert judged.judge_send(b"bob", "dm:ann:bob", 0) is None


def test_history_rate() -> None:
    judged = admission()
    assert [judged.judge_history(b"ann", 0) for _ in range(5)] == [None] * 5
    assert judged.judge_history(b"ann", 0) == Refusal("per_user_history_pull_rate", 200)


def test_connections_per_address() -> None:
    limiter = ConnectLimiter(rate=RateLimiter(per_ms=50, burst=20), connections_max=2)
    assert limiter.admit("192.0.2.1", 0) is None
    assert limiter.admit("192.0.2.1", 0) is None
    assert limiter.admit("192.0.2.1", 0) == "per_ip_max_connections"
    assert limiter.admit("192.0.2.2", 0) is None
    limiter.release("192.0.2.1")
    assert limiter.admit("192.0.2.1", 0) is None
    for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2"):
        limiter.release(address)
    assert limiter._open == {}


def test_connect_rate_per_address() -> None:
    limiter = ConnectLimiter(rate=RateLimiter(per_ms=50, burst=2), connections_max=100)
    assert [limiter.admit("a", 0) for _ in range(3)] == [None, None, "per_ip_connect_rate"]
    assert limiter.admit("a", 50) is None
