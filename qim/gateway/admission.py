"""First-level admission of sends and history reads (§8.2 L1, §20.4.1); pure.

Judged here in memory for a quick answer; the ConversationWriter judges again and has the last word. State is one number
per key, bounded: a limiter that forgets the key unused for longest can only be too kind.
"""

from __future__ import annotations

from typing import NamedTuple

from qim.core.rate_limit import RateLimiter


class Refusal(NamedTuple):
    """RATE_LIMITED: `dimension` is the parameter that was exceeded (metric label)."""

    dimension: str
    retry_after_ms: float


class Admission:
    """The limiters of one gateway worker. First refusal ends it and no bucket loses a token (§8.2)."""

    __slots__ = ("_history", "_per_sender_in_conversation", "_per_user")

    def __init__(self, *, per_user: RateLimiter, per_sender_in_conversation: RateLimiter, history: RateLimiter) -> None:
        self._per_user = per_user
        self._per_sender_in_conversation = per_sender_in_conversation
        self._history = history

    def judge_send(self, user_key: bytes, conversation_id: str, now_ms: float) -> Refusal | None:
        """L1a, then L1b; None admits and charges both."""
        lane = (user_key, conversation_id)
        wait_ms = self._per_sender_in_conversation.wait_ms(lane, now_ms)
        if wait_ms > 0:
            return Refusal("per_sender_in_conversation_rate", wait_ms)
        wait_ms = self._per_user.wait_ms(user_key, now_ms)
        if wait_ms > 0:
            return Refusal("per_user_msg_rate", wait_ms)
        self._per_sender_in_conversation.take(lane, now_ms)
        self._per_user.take(user_key, now_ms)
        return None

    def judge_history(self, user_key: bytes, now_ms: float) -> Refusal | None:
        """`per_user_history_pull_rate`."""
        wait_ms = self._history.wait_ms(user_key, now_ms)
        if wait_ms > 0:
            return Refusal("per_user_history_pull_rate", wait_ms)
        self._history.take(user_key, now_ms)
        return None


class ConnectLimiter:
    """`per_ip_connect_rate` and `per_ip_max_connections`, judged at accept (§15.2.3)."""

    __slots__ = ("_connections_max", "_open", "_rate")

    def __init__(self, *, rate: RateLimiter, connections_max: int) -> None:
        self._rate = rate
        self._connections_max = connections_max
        self._open: dict[str, int] = {}

    def admit(self, address: str, now_ms: float) -> str | None:
        """None admits and counts the connection; else the parameter that was exceeded."""
        held = self._open.get(address, 0)
        if held >= self._connections_max:
            return "per_ip_max_connections"
        if self._rate.wait_ms(address, now_ms) > 0:
            return "per_ip_connect_rate"
        self._rate.take(address, now_ms)
        self._open[address] = held + 1
        return None

    def release(self, address: str) -> None:
        """A connection that was admitted is gone."""
        held = self._open[address] - 1
        if held:
            self._open[address] = held
        else:
            del self._open[address]
