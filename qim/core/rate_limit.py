"""Token buckets, bounded and pure (§8.2, §20.4.1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

KEYS_MAX: Final = 65536
"""Bound of one limiter: about 12 MiB when full. The key unused for longest is forgotten, which can only be too kind."""


class RateLimiter:
    """Token buckets in the form of one time per key: when the bucket will be full again (GCRA)."""

    __slots__ = ("_full_at", "_interval_ms", "_keys_max", "_tolerance_ms")

    def __init__(self, *, per_ms: float, burst: int, keys_max: int = KEYS_MAX) -> None:
        """One token every `per_ms`, at most `burst` saved up."""
        if per_ms <= 0 or burst < 1:
            raise ValueError("a rate limit needs a positive interval and a burst of at least 1")
        self._interval_ms = per_ms
        self._tolerance_ms = per_ms * (burst - 1)
        self._keys_max = keys_max
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def wait_ms(self, key: Hashable, now_ms: float) -> float:
        """0 when a token is there, else how long until there is one; takes nothing."""
        return max(0.0, self._full_at.get(key, 0.0) - self._tolerance_ms - now_ms)

    def take(self, key: Hashable, now_ms: float) -> None:
        """Take the token that `wait_ms` found."""
        self._full_at[key] = max(self._full_at.get(key, 0.0), now_ms) + self._interval_ms
        self._full_at.move_to_end(key)
        if len(self._full_at) > self._keys_max:
            self._full_at.popitem(last=False)

    def __len__(self) -> int:
        return len(self._full_at)
