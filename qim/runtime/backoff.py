"""Exponential backoff with jitter, pure: the random source is an argument."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """Delays initial, initial·factor, … up to max, each ± jitter.

    `alive_reset_ms`: a run that lived at least this long counts as success, so the next delay is the initial one again.
    """

    __slots__ = ("_alive_reset_ms", "_factor", "_initial_ms", "_jitter_ratio", "_max_ms", "_next_ms", "_random")

    def __init__(
        self,
        *,
        initial_ms: float,
        factor: float,
        max_ms: float,
        jitter_ratio: float,
        random_unit: Callable[[], float],
        alive_reset_ms: float | None = None,
    ) -> None:
        if not (0 < initial_ms <= max_ms and factor >= 1 and 0 <= jitter_ratio < 1):
            raise ValueError("backoff needs 0 < initial <= max, factor >= 1 and 0 <= jitter < 1")
        self._initial_ms = initial_ms
        self._factor = factor
        self._max_ms = max_ms
        self._jitter_ratio = jitter_ratio
        self._alive_reset_ms = alive_reset_ms
        self._next_ms = initial_ms
        self._random = random_unit

    def delay_ms(self) -> float:
        """How long to wait before the next try; every call without `reset` waits longer."""
        base_ms = self._next_ms
        self._next_ms = min(base_ms * self._factor, self._max_ms)
        return base_ms * (1 + self._jitter_ratio * (2 * self._random() - 1))

    def delay_after_run_ms(self, alive_ms: float) -> float:
        """As `delay_ms`, for something that ran `alive_ms` before it ended."""
        if self._alive_reset_ms is not None and alive_ms >= self._alive_reset_ms:
            self.reset()
        return self.delay_ms()

    def reset(self) -> None:
        """It worked: start again from the initial delay."""
        self._next_ms = self._initial_ms
