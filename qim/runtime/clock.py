"""The only place that reads the clock. Machines take `now_ms` as an argument, drivers take a `Clock`."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Final, Protocol

STEP_VARIABLE: Final = "QIM_TEST_CLOCK_STEP"


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


class SteppedClock:
    """The kernel's clocks, with a wall clock that a test may step.

    By as many ms as the file says, one i64 in the order of the machine. Processes that map one file are one host whose
    clock is set. The file must exist.
    """

    __slots__ = ("_step",)

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._step = memoryview(mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)).cast("q")

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._step[0]

    def monotonic_ms(self) -> float:
        return time.monotonic_ns() / 1e6


def process_clock() -> Clock:
    """The clock of a node's process: the kernel's, or the one in the file that QIM_TEST_CLOCK_STEP names."""
    path = os.environ.get(STEP_VARIABLE)
    return SteppedClock(Path(path)) if path else SystemClock()
