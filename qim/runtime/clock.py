"""The only place that reads the clock. Machines take `now_ms` as an argument, drivers take a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two times that never mix: one to store and show, one to measure and wait."""

    def unix_ms(self) -> int:
        """Wall clock, ms since 1970; may step."""
        ...

    def monotonic_ms(self) -> float:
        """Never goes back; meaningless outside this host."""
        ...


class SystemClock:
    """The kernel's clocks."""

    __slots__ = ()

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic_ns() / 1e6
