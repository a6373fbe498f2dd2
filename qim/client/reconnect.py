"""When to connect again (§15.2.1): growing delays with mandatory jitter, and the server's own orders before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

RECONNECT_INITIAL_MS: Final = 1000.0
RECONNECT_FACTOR: Final = 1.8
RECONNECT_MAX_MS: Final = 120_000.0
JITTER_RATIO: Final = 0.30


def jittered_ms(delay_ms: float, random_unit: Callable[[], float]) -> float:
    """`delay_ms` ± 30 %; `random_unit` returns 0 … 1."""
    return delay_ms * (1 + JITTER_RATIO * (2 * random_unit() - 1))


class Reconnect:
    """Delay before the next attempt, and the one fast attempt a network event allows.

    `scale` shrinks every delay, the server's orders included: tests and replays live faster than people.
    """

    __slots__ = ("_random", "_scale", "_initial_ms", "_max_ms", "_next_ms", "_fast_allowed", "_fast_wanted")

    def __init__(
        self,
        random_unit: Callable[[], float],
        *,
        scale: float = 1.0,
        initial_ms: float = RECONNECT_INITIAL_MS,
        max_ms: float = RECONNECT_MAX_MS,
    ) -> None:
        self._random = random_unit
        self._scale = scale
        self._initial_ms = initial_ms
        self._max_ms = max_ms
        self._next_ms = initial_ms
        self._fast_allowed = True
        self._fast_wanted = False

    def logged_in(self) -> None:
        """A login succeeded: delays start again, fast reconnects are allowed again."""
        self._next_ms = self._initial_ms
        self._fast_allowed = True

    def rate_limited(self) -> None:
        """The server is shedding load: no fast reconnect until the next successful login."""
        self._fast_allowed = False

    def network_changed(self) -> None:
        """The platform reports another network: the next attempt may be immediate, once."""
        self._fast_wanted = self._fast_allowed

    def delay_ms(self, retry_after_ms: int | None = None) -> float:
        """Delay before the next attempt; `retry_after_ms` is the server's order and counts as the base when larger."""
        if self._fast_wanted and retry_after_ms is None:
            self._fast_wanted = False
            return 0.0
        base_ms = self._next_ms
        self._next_ms = min(base_ms * RECONNECT_FACTOR, self._max_ms)
        if retry_after_ms is not None:
            base_ms = max(float(retry_after_ms), min(base_ms, self._initial_ms))
        return jittered_ms(base_ms, self._random) * self._scale
