"""A worker's rest between two pieces of work: ended by news or by the next safety poll."""

from __future__ import annotations

import asyncio


class Wakeable:
    """Base of what one task serves: `wait` when nothing is left to do, `wake` when something came."""

    __slots__ = ("_wake", "idle")

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        """Set while there is nothing left to do."""
        self._wake: asyncio.Future[None] | None = None

    def wake(self) -> None:
        self.idle.clear()
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait(self, timeout_ms: float) -> None:
        """Until `wake` or the time is over."""
        self.idle.set()
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        timer = loop.call_later(timeout_ms / 1000, self.wake)
        try:
            await self._wake
        finally:
            timer.cancel()
            self._wake = None
