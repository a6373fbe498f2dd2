"""First-level admission."""

from __future__ import annotations

from qim.core.rate_limit import RateLimiter
from qim.gateway.admission import Admission, ConnectLimiter, Refusal


def admission() -> Admission:
    return Admission(
        per_user=RateLimiter(per_ms=50, burst=40),
        per_sender_in_conversation=RateLimiter(per_ms=3000, burst=20),
        history=RateLimiter(per_ms=200, burst=5),
    )


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
