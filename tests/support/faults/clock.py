"""A node whose wall clock a test steps while it runs: all its processes at once, as one host."""

from __future__ import annotations

import mmap
from pathlib import Path

from qim.app.own_node import OwnNodeOptions
from qim.runtime.clock import STEP_VARIABLE
from tests.support.node import options_with


class HostClock:
    """The clock of the nodes that were started with `options`; monotonic clocks never step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(8))
        self._path = path
        with path.open("r+b") as file:
            self._step = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    def options(self, base: OwnNodeOptions) -> OwnNodeOptions:
        """`base` on this clock."""
        return options_with(base, **{STEP_VARIABLE.removeprefix("QIM_").lower(): str(self._path)})

    def step(self, by_ms: int) -> None:
        """Move the clock; it goes on from there."""
        self._step[0] += by_ms

    def set_right(self) -> None:
        """Back to the kernel's time."""
        self._step[0] = 0
