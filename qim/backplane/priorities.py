"""The send queue of one link: five priorities, weighted round robin with a quantum of bytes (§11.3.2)."""

from __future__ import annotations

from collections import deque
from typing import Final

from qim.backplane.api import Priority

QUANTUM_BYTES: Final = 64 * 1024
"""`stream_scheduling_quantum`."""
WEIGHTS: Final = (16, 8, 4, 2, 1)
"""Quanta per round of each priority, so that a flood of one never silences the next."""


class PriorityQueues:
    """Frames as (header, body) pairs. A priority holds at most `queue_bytes_max` bytes; more is refused."""

    __slots__ = ("_bytes", "_credit", "_queue_bytes_max", "_queues", "queued_bytes")

    def __init__(self, queue_bytes_max: int) -> None:
        self.queued_bytes = 0
        self._queue_bytes_max = queue_bytes_max
        self._queues: tuple[deque[bytes], ...] = tuple(deque() for _ in Priority)
        self._bytes = [0] * len(Priority)
        self._credit = [0] * len(Priority)

    def put(self, priority: int, header: bytes, body: bytes) -> bool:
        """False: no room, nothing queued."""
        size = len(header) + len(body)
        total = self._bytes[priority] + size
        if total > self._queue_bytes_max:
            return False
        queue = self._queues[priority]
        queue.append(header)
        queue.append(body)
        self._bytes[priority] = total
        self.queued_bytes += size
        return True

    def take(self) -> bytes:
        """The next bytes to write, whole frames: everything if it fits the quantum, else about one quantum of it."""
        if self.queued_bytes > QUANTUM_BYTES:
            return self._take_quantum()
        parts: list[bytes] = []
        for priority, queue in enumerate(self._queues):
            if queue:
                parts += queue
                queue.clear()
                self._bytes[priority] = 0
        self.queued_bytes = 0
        return b"".join(parts)

    def clear(self) -> None:
        """Drop everything: the link is gone."""
        for priority, queue in enumerate(self._queues):
            queue.clear()
            self._bytes[priority] = 0
        self.queued_bytes = 0

    def _take_quantum(self) -> bytes:
        parts: list[bytes] = []
        taken = 0
        while taken < QUANTUM_BYTES and self.queued_bytes:
            priority = self._next_priority()
            queue = self._queues[priority]
            header, body = queue.popleft(), queue.popleft()
            size = len(header) + len(body)
            self._bytes[priority] -= size
            self._credit[priority] -= size
            self.queued_bytes -= size
            taken += size
            parts += (header, body)
        return b"".join(parts)

    def _next_priority(self) -> int:
        """The first priority with frames and credit; a new round begins when none has credit left."""
        while True:
            for priority, queue in enumerate(self._queues):
                if queue and self._credit[priority] > 0:
                    return priority
            for priority, weight in enumerate(WEIGHTS):
                quanta = weight * QUANTUM_BYTES
                self._credit[priority] = min(self._credit[priority] + quanta, quanta)
