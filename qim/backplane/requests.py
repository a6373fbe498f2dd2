"""Requests in flight: matched by id, bounded per peer, timed out by one sweeper for the whole process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from qim.backplane.api import AnswerHandler, PeerUnavailable
from qim.obs import metrics
from qim.obs.logs import get_logger

log = get_logger(__name__)

IN_FLIGHT_MAX: Final = 4096
"""Per peer process (DESIGN §4): more than a second of the heaviest traffic; a peer that far behind is not served."""
SWEEP_INTERVAL_MS: Final = 20
"""Deadlines are checked this often: late by at most 1 % of the shortest timeout in use."""
_REQUEST_ID_MAX: Final = 0xFFFFFFFF


class InFlight:
    """The open requests to one peer process."""

    __slots__ = ("_handlers", "_in_flight_max", "_last_id", "_peer")

    def __init__(self, peer: str, in_flight_max: int = IN_FLIGHT_MAX) -> None:
        self._peer = peer
        self._handlers: dict[int, AnswerHandler] = {}
        self._last_id = 0
        self._in_flight_max = in_flight_max

    def __len__(self) -> int:
        return len(self._handlers)

    def open(self, on_answer: AnswerHandler) -> int:
        """Id of a new request; PeerUnavailable when the window is full."""
        if len(self._handlers) >= self._in_flight_max:
            raise PeerUnavailable(f"{self._in_flight_max} requests to {self._peer} are in flight")
        request_id = self._last_id % _REQUEST_ID_MAX + 1
        while request_id in self._handlers:
            request_id = request_id % _REQUEST_ID_MAX + 1
        self._last_id = request_id
        self._handlers[request_id] = on_answer
        return request_id

    def answer(self, request_id: int, body: bytes) -> bool:
        """False: nobody waits for it any more."""
        on_answer = self._handlers.pop(request_id, None)
        if on_answer is None:
            return False
        self._tell(on_answer, body)
        return True

    def fail(self, request_id: int, reason: str) -> bool:
        """PeerUnavailable for one request. False: it was not open any more."""
        on_answer = self._handlers.pop(request_id, None)
        if on_answer is None:
            return False
        self._tell(on_answer, PeerUnavailable(f"{self._peer}: {reason}"))
        return True

    def expire(self, request_id: int) -> None:
        """Its deadline has come."""
        if self.fail(request_id, "no answer in time"):
            metrics.BACKPLANE_REQUEST_TIMEOUT_TOTAL.labels(peer=self._peer).inc()

    def fail_all(self, reason: str) -> None:
        """The link is gone: nobody will answer."""
        for request_id in list(self._handlers):
            self.fail(request_id, reason)

    def _tell(self, on_answer: AnswerHandler, outcome: bytes | PeerUnavailable) -> None:
        try:
            on_answer(outcome)
        except Exception as error:  # noqa: BLE001  a caller's fault is not the link's
            metrics.TASK_FAILED_TOTAL.inc()
            log.error("backplane_answer_handler_failed", peer=self._peer, error=error)


class DeadlineSweeper:
    """One timer for all deadlines of a process; it runs only while a request may be open.

    Time is cut into sweeps: a request hangs in the list of the sweep that will end it, most are answered long before.
    """

    __slots__ = ("_due", "_now_ms", "_timer")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._due: dict[int, list[tuple[InFlight, int]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, in_flight: InFlight, request_id: int, timeout_ms: int) -> None:
        """Fail the request in `timeout_ms`, at most two sweeps later, unless it is answered before."""
        sweep = int((self._now_ms() + timeout_ms) // SWEEP_INTERVAL_MS) + 1
        due = self._due.get(sweep)
        if due is None:
            due = self._due[sweep] = []
        due.append((in_flight, request_id))
        if self._timer is None:
            self._timer = self._later()

    def close(self) -> None:
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        sweep_now = int(self._now_ms() // SWEEP_INTERVAL_MS)
        for sweep in [sweep for sweep in self._due if sweep <= sweep_now]:
            for in_flight, request_id in self._due.pop(sweep):
                in_flight.expire(request_id)
        self._timer = self._later() if self._due else None

    def _later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(SWEEP_INTERVAL_MS / 1000, self._sweep)
