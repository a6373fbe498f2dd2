"""Requests in flight: matched by id, bounded per peer, timed out by one sweeper for the whole process."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

from qim.backplane.api import PeerUnavailable
from qim.obs import metrics

IN_FLIGHT_MAX: Final = 4096
"""Per peer process (DESIGN §4): more than a second of the heaviest traffic; a peer that far behind is not served."""
SWEEP_INTERVAL_MS: Final = 20
"""Deadlines are checked this often: late by at most 1 % of the shortest timeout in use."""
_REQUEST_ID_MAX: Final = 0xFFFFFFFF


class InFlight:
    """The open requests to one peer process."""

    __slots__ = ("_futures", "_in_flight_max", "_last_id", "_peer")

    def __init__(self, peer: str, in_flight_max: int = IN_FLIGHT_MAX) -> None:
        self._peer = peer
        self._futures: dict[int, asyncio.Future[bytes]] = {}
        self._last_id = 0
        self._in_flight_max = in_flight_max

    def __len__(self) -> int:
        return len(self._futures)

    def open(self, future: asyncio.Future[bytes]) -> int:
        """Id of a new request; PeerUnavailable when the window is full."""
        if len(self._futures) >= self._in_flight_max:
            raise PeerUnavailable(f"{self._in_flight_max} requests to {self._peer} are in flight")
        request_id = self._last_id % _REQUEST_ID_MAX + 1
        while request_id in self._futures:
            request_id = request_id % _REQUEST_ID_MAX + 1
        self._last_id = request_id
        self._futures[request_id] = future
        return request_id

    def answer(self, request_id: int, body: bytes) -> bool:
        """False: nobody waits for it any more."""
        future = self._futures.pop(request_id, None)
        if future is None or future.done():
            return False
        future.set_result(body)
        return True

    def fail(self, request_id: int, reason: str) -> bool:
        """PeerUnavailable for one request. False: it was not open any more."""
        future = self._futures.pop(request_id, None)
        if future is None or future.done():
            return False
        future.set_exception(PeerUnavailable(f"{self._peer}: {reason}"))
        return True

    def expire(self, request_id: int) -> None:
        """Its deadline has come."""
        if self.fail(request_id, "no answer in time"):
            metrics.BACKPLANE_REQUEST_TIMEOUT_TOTAL.labels(peer=self._peer).inc()

    def fail_all(self, reason: str) -> None:
        """The link is gone: nobody will answer."""
        for request_id in list(self._futures):
            self.fail(request_id, reason)


class DeadlineSweeper:
    """One timer for all deadlines of a process; it runs only while a request is open."""

    __slots__ = ("_count", "_heap", "_now_ms", "_timer")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._heap: list[tuple[float, int, InFlight, int]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, in_flight: InFlight, request_id: int, timeout_ms: int) -> None:
        """Fail the request in `timeout_ms` unless it is answered before."""
        self._count += 1
        heapq.heappush(self._heap, (self._now_ms() + timeout_ms, self._count, in_flight, request_id))
        if self._timer is None:
            self._timer = self._later()

    def close(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now_ms = self._now_ms()
        while self._heap and self._heap[0][0] <= now_ms:
            _, _, in_flight, request_id = heapq.heappop(self._heap)
            in_flight.expire(request_id)
        self._timer = self._later() if self._heap else None

    def _later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(SWEEP_INTERVAL_MS / 1000, self._sweep)
