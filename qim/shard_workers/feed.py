"""The next records of one log partition, from hints that carry them and from reads of the log (DESIGN-data §4).

A hint that carries the next offset is used at once; one from further ahead waits a moment for the missing hint, then
the log is read. Nothing is ever skipped: whatever is not in `ready` is still to be read from `next_offset` on. A hint
that is lost shows as a gap with the next one, so the safety poll is for silence only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qim.commit_log.api import LogRecord

READY_RECORDS_MAX = 4096
"""Records held for the consumer; a hint beyond is dropped and read from the log later."""
STASHED_HINTS_MAX = 64
"""Hints held behind a gap; one beyond is dropped and read from the log later."""
GAP_WAIT_MS = 3.0
"""Hints of two producers may cross on the way: a read of the log costs more than this wait."""


class LogFeed:
    """Records of one partition in offset order; pure, time is an argument in monotonic ms."""

    __slots__ = ("next_offset", "ready", "_stash", "_gap_since_ms", "_behind", "_heard_at_ms", "_poll_ms")

    def __init__(self, next_offset: int, *, poll_interval_ms: float) -> None:
        self.next_offset = next_offset
        """Offset of the record after the last one put into `ready`."""
        self.ready: deque[LogRecord] = deque()
        self._stash: dict[int, Sequence[bytes]] = {}
        self._gap_since_ms: float | None = None
        self._behind = True
        self._heard_at_ms = -poll_interval_ms
        self._poll_ms = poll_interval_ms

    def offer_hint(self, first_offset: int, values: Sequence[bytes], now_ms: float) -> bool:
        """Take the records of a hint; False when it did not carry the next offset (a gap)."""
        if first_offset > self.next_offset or len(self.ready) >= READY_RECORDS_MAX:
            if first_offset + len(values) <= self.next_offset:
                return True
            if len(self._stash) < STASHED_HINTS_MAX and len(self.ready) < READY_RECORDS_MAX:
                self._stash[first_offset] = values
            else:
                self._behind = True
            if self._gap_since_ms is None:
                self._gap_since_ms = now_ms
            return False
        self._heard_at_ms = now_ms
        self._append(first_offset, values)
        while self._stash:
            first = min(self._stash)
            if first > self.next_offset:
                return True
            self._append(first, self._stash.pop(first))
        self._gap_since_ms = None
        return True

    def offer_read(self, records: Sequence[LogRecord], *, complete: bool, now_ms: float) -> None:
        """Take what a read of the log from `next_offset` returned; `complete`: the log held no more."""
        self._heard_at_ms = now_ms
        if records:
            self._append(records[0].offset, [record.value for record in records])
        self._behind = not complete
        for first in sorted(self._stash):
            if first > self.next_offset:
                break
            self._append(first, self._stash.pop(first))
        if not self._stash:
            self._gap_since_ms = None

    def room(self) -> int:
        """How many records a read may bring."""
        return READY_RECORDS_MAX - len(self.ready)

    def read_due_in_ms(self, now_ms: float) -> float:
        """Time until the log should be read: 0 at once, the wait of a gap, else the poll after silence."""
        if self.room() <= 0:
            return self._poll_ms
        if self._behind:
            return 0.0
        if self._gap_since_ms is not None:
            return max(0.0, self._gap_since_ms + GAP_WAIT_MS - now_ms)
        return max(0.0, self._heard_at_ms + self._poll_ms - now_ms)

    def _append(self, first_offset: int, values: Sequence[bytes]) -> None:
        offset = self.next_offset
        for value in values[offset - first_offset :] if offset > first_offset else values:
            self.ready.append(LogRecord(offset, value))
            offset += 1
        self.next_offset = offset
