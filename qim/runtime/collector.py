"""Python's cycle collector in a process that serves."""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (10_000, 20, 20)
"""What a message makes is freed by its reference counts; with Python's own 700, 10 and 10 the collector looked at
everything that is kept, 50 ms at a time, every four seconds, and found nothing."""


def settle() -> None:
    """What was made during start-up stays: collections need not look at it again (DESIGN §7), and become rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
