"""When an open-loop generator sends: a Poisson process that waits for nobody, pure.

A closed loop slows down with the system it measures and hides the queue; here the time a message was due is fixed
before anything is known about the answers, and latency counts from it.
"""

from __future__ import annotations

import random


class Arrivals:
    """Due times in seconds of any clock, from `start_s` on, on average `rate_per_s` a second; the same for one seed."""

    __slots__ = ("_next_s", "_random", "_rate_per_s")

    def __init__(self, rate_per_s: float, *, start_s: float, seed: int) -> None:
        if rate_per_s <= 0:
            raise ValueError(f"rate {rate_per_s} is not positive")
        self._rate_per_s = rate_per_s
        self._random = random.Random(seed)
        self._next_s = start_s + self._random.expovariate(rate_per_s)

    def due(self, now_s: float) -> list[float]:
        """The times that have come since the last call, ascending."""
        found = []
        while self._next_s <= now_s:
            found.append(self._next_s)
            self._next_s += self._random.expovariate(self._rate_per_s)
        return found
