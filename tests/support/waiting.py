"""Polling for conditions of real processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], *, timeout_s: float = 10.0, every_s: float = 0.02) -> None:
    """Return when `condition()` is true; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not reached in {timeout_s} s: {condition}"
        time.sleep(every_s)
