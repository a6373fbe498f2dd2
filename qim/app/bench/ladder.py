"""Search for the highest rate a system sustains, pure: up by a factor until it fails, then halve the interval."""

from __future__ import annotations

from typing import Final

STEP_UP: Final = 1.5
RESOLUTION: Final = 1.08
"""The search ends when the lowest failed rate is less than this times the highest sustained one."""
BACK_OFF: Final = 0.92
"""A rate that a short probe held and a long point did not is lowered by this factor."""


class RateLadder:
    """Ask `next_rate`, try it, tell `judged`; None ends the search. `best` is 0 when nothing was sustained."""

    __slots__ = ("_failed", "_first", "_most", "best")

    def __init__(self, first: float, most: float) -> None:
        """`first`: the rate to begin with; `most`: never try more."""
        self._first = first
        self._most = most
        self._failed = 0.0
        self.best = 0.0

    def next_rate(self) -> float | None:
        if not self._failed:
            if not self.best:
                return self._first
            return None if self.best >= self._most else min(self.best * STEP_UP, self._most)
        if not self.best:
            lower = self._failed / STEP_UP / STEP_UP
            return lower if lower >= 1 else None
        if self._failed / self.best < RESOLUTION:
            return None
        return float((self._failed * self.best) ** 0.5)

    def judged(self, rate: float, *, sustained: bool) -> None:
        """The outcome of a try at `rate`."""
        if sustained:
            self.best = max(self.best, rate)
        else:
            self._failed = min(self._failed or rate, rate)
