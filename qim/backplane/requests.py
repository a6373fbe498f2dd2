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
"""Deadlines are checked this often: late by at most 2 % of the shortest timeout in use."""
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

    Requests of one timeout that begin between two sweeps share a list, and its deadline: nothing is sorted and no clock
    is read per request, and most are answered long before anybody looks.
    """

    __slots__ = ("_begun", "_due", "_now_ms", "_timer")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._begun: dict[int, list[tuple[InFlight, int]]] = {}
        """By timeout: begun since the last sweep."""
        self._due: list[tuple[float, list[tuple[InFlight, int]]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, in_flight: InFlight, request_id: int, timeout_ms: int) -> None:
        """Fail the request in `timeout_ms`, at most two sweeps later, unless it is answered before."""
        begun = self._begun.get(timeout_ms)
        if begun is None:
            begun = self._begun[timeout_ms] = []
            if self._timer is None:
                self._timer = self._later()
        begun.append((in_flight, request_id))

    def close(self) -> None:
        self._begun.clear()
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now_ms = self._now_ms()
        begun, self._begun = self._begun, {}
        over = [watched for due_ms, watched in self._due if due_ms <= now_ms]
        self._due = [item for item in self._due if item[0] > now_ms]
        self._due += [(now_ms + timeout_ms, watched) for timeout_ms, watched in begun.items()]
        for watched in over:
            for in_flight, request_id in watched:
                in_flight.expire(request_id)
        self._timer = self._later() if self._due or self._begun else None

    def _later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(SWEEP_INTERVAL_MS / 1000, self._sweep)
