"""What a connection still has to send: four streams, bounded by frames and bytes (A.5, §11.3.1, §15.4.3).

Stream 0 goes first and is never dropped. The others share the socket by weight, 64 KiB a slice. Pushes are droppable:
past the soft bound they are discarded, the queued ones too, and the connection turns dirty: the client pulls. Answers
to requests are not droppable: what a client may have in flight bounds them, and a peer that still reaches the hard
bound is closed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from qim.protocol.opcodes import STREAM_BULK, STREAM_CONTROL, STREAM_REALTIME, STREAM_ROOM

SLICES_PER_ROUND: Final = {STREAM_REALTIME: 4, STREAM_BULK: 2, STREAM_ROOM: 1}
"""Slices of one quantum each stream gets per round: single chat before backlog before rooms (§11.3.2)."""
_SHARED: Final = tuple(SLICES_PER_ROUND)

Parts = tuple[bytes, ...]
"""One frame as pieces to be joined by the socket write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundLimits:
    """`conn_send_{soft,hard,low}_watermark` and `stream_scheduling_quantum` (B.5, B.4)."""

    soft_bytes: int = 1 << 20
    soft_frames: int = 2000
    hard_bytes: int = 4 << 20
    hard_frames: int = 8000
    low_bytes: int = 256 << 10
    quantum_bytes: int = 64 << 10


class Verdict(Enum):
    QUEUED = "queued"
    DROPPED = "dropped"
    """A push was not queued; `dirty` is set."""
    OVERFLOW = "overflow"
    """Hard bound reached: close the connection. The frame was not queued."""


class OutboundQueue:
    """Frames of one connection in the order they will be written."""

    __slots__ = (
        "_credit",
        "_degraded",
        "_limits",
        "_streams",
        "_turn",
        "dirty",
        "dropped",
        "queued_bytes",
        "queued_frames",
    )

    def __init__(self, limits: OutboundLimits) -> None:
        self._limits = limits
        self._streams: tuple[deque[tuple[int, bool, Parts]], ...] = (deque(), deque(), deque(), deque())
        self._turn = 0
        self._credit = SLICES_PER_ROUND[_SHARED[0]] * limits.quantum_bytes
        self._degraded = False
        self.queued_bytes = 0
        self.queued_frames = 0
        self.dirty = False
        """Set when a push was dropped; the owner tells the client MAILBOX_DIRTY and clears it."""
        self.dropped = 0
        """Frames dropped since the connection began."""

    @property
    def degraded(self) -> bool:
        """True from the soft bound until the queue is down to the low bound."""
        return self._degraded

    def push(self, stream_id: int, parts: Parts, *, droppable: bool) -> Verdict:
        """Queue one frame. `droppable`: a push the mailbox can repeat, never an answer or a control frame."""
        size = sum(map(len, parts))
        limits = self._limits
        if stream_id == STREAM_CONTROL:
            return self._queue(stream_id, size, False, parts)
        if self.queued_bytes + size > limits.hard_bytes or self.queued_frames >= limits.hard_frames:
            return Verdict.OVERFLOW
        if not self._degraded and (
            self.queued_bytes + size > limits.soft_bytes or self.queued_frames >= limits.soft_frames
        ):
            self._degrade()
        if droppable and self._degraded:
            self._drop(1)
            return Verdict.DROPPED
        return self._queue(stream_id, size, droppable, parts)

    def take(self, budget_bytes: int) -> list[bytes]:
        """Pieces for one socket write: at least one frame if any is queued, then more while they fit the budget."""
        taken: list[bytes] = []
        left = budget_bytes
        control = self._streams[STREAM_CONTROL]
        while control:
            left -= self._pop(control, taken)
        while self.queued_frames and (left > 0 or not taken):
            stream = self._streams[_SHARED[self._turn]]
            if not stream or self._credit <= 0:
                self._next_turn()
                continue
            size = stream[0][0]
            if size > left and taken:
                break
            left -= self._pop(stream, taken)
            self._credit -= size
        if self._degraded and self.queued_bytes <= self._limits.low_bytes:
            self._degraded = False
        return taken

    def _queue(self, stream_id: int, size: int, droppable: bool, parts: Parts) -> Verdict:
        self._streams[stream_id].append((size, droppable, parts))
        self.queued_bytes += size
        self.queued_frames += 1
        return Verdict.QUEUED

    def _pop(self, stream: deque[tuple[int, bool, Parts]], taken: list[bytes]) -> int:
        size, _, parts = stream.popleft()
        taken.extend(parts)
        self.queued_bytes -= size
        self.queued_frames -= 1
        return size

    def _next_turn(self) -> None:
        """The next stream gets its slices; a frame larger than what is left of them goes whole (§15.4.3)."""
        self._turn = (self._turn + 1) % len(_SHARED)
        self._credit = SLICES_PER_ROUND[_SHARED[self._turn]] * self._limits.quantum_bytes

    def _degrade(self) -> None:
        """Discard queued pushes: a client that must pull anyway gains nothing from them (§11.3.1)."""
        self._degraded = True
        for stream_id in _SHARED:
            stream = self._streams[stream_id]
            kept = [item for item in stream if not item[1]]
            if len(kept) == len(stream):
                continue
            self._drop(len(stream) - len(kept))
            self.queued_bytes -= sum(item[0] for item in stream if item[1])
            self.queued_frames -= len(stream) - len(kept)
            stream.clear()
            stream.extend(kept)

    def _drop(self, frames: int) -> None:
        self.dropped += frames
        self.dirty = True
