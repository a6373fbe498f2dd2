from __future__ import annotations

import time

from qim.runtime.clock import SystemClock


def test_units_are_milliseconds() -> None:
    clock = SystemClock()
    assert abs(clock.unix_ms() - time.time() * 1000) < 1000
    assert abs(clock.monotonic_ms() - time.monotonic() * 1000) < 1000


def test_monotonic_time_does_not_go_back() -> None:
    clock = SystemClock()
    read = [clock.monotonic_ms() for _ in range(100)]
    assert read == sorted(read)
