"""One outbox partition: what to dispatch next and how far the checkpoint may go (DESIGN-data §4), pure."""

from __future__ import annotations

from math import inf
from typing import Final

from qim.commit_log.api import LogRecord
from qim.shard_workers.feed import LogFeed

BATCH_RECORDS_MAX: Final = 256
CHECKPOINT_RECORDS: Final = 256
CHECKPOINT_INTERVAL_MS: Final = 500.0
"""What is dispatched again after a crash is dropped by its source: a checkpoint may be late, never early."""


class PartitionMachine:
    """At most one batch is in work; the next one starts when all dispatches of it are durable."""

    __slots__ = ("_batch", "_saved_ms", "durable", "feed", "saved")

    def __init__(self, next_offset: int, *, poll_interval_ms: float, now_ms: float) -> None:
        self.feed = LogFeed(next_offset, poll_interval_ms=poll_interval_ms)
        self.durable = next_offset
        """All dispatches of the records below are durable."""
        self.saved = next_offset
        """The checkpoint."""
        self._batch: list[LogRecord] = []
        self._saved_ms = now_ms

    def next_batch(self) -> list[LogRecord]:
        """Records to dispatch, in order; the same ones again until `dispatched`. Empty when there is nothing."""
        if not self._batch:
            ready = self.feed.ready
            self._batch = [ready.popleft() for _ in range(min(len(ready), BATCH_RECORDS_MAX))]
        return self._batch

    def dispatched(self) -> None:
        """Every dispatch of the batch is durable."""
        assert self._batch[0].offset == self.durable, "batches are contiguous"
        self.durable = self._batch[-1].offset + 1
        self._batch = []

    def oldest(self) -> LogRecord | None:
        """The first record whose dispatches are not durable, as far as it was read."""
        if self._batch:
            return self._batch[0]
        return self.feed.ready[0] if self.feed.ready else None

    def checkpoint_in_ms(self, now_ms: float) -> float:
        """Time until the checkpoint should be saved: 0 at once, infinite when it is up to date."""
        ahead = self.durable - self.saved
        if not ahead:
            return inf
        if ahead >= CHECKPOINT_RECORDS:
            return 0.0
        return max(0.0, self._saved_ms + CHECKPOINT_INTERVAL_MS - now_ms)

    def checkpoint_saved(self, next_offset: int, now_ms: float) -> None:
        self._saved_ms = now_ms
        self.saved = next_offset
