"""Embedded logs forget what nobody may read any more (DESIGN-data §4, §18.3.4).

The caller says how far a partition may be trimmed at all; within that, records stay for `log_retention`, or, when the
partitions of this worker take too much memory, no longer than they must. Ages are those written in the records, so that
nothing about time has to be kept between two processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from qim.commit_log.api import TrimmableLog
from qim.errors import StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.runtime.clock import Clock

log = get_logger(__name__)

EARLY_TRIM_RATIO: Final = 0.75
"""Of the allowed bytes: from here on records do not reach their retention, so that sends need not be refused."""


class LogRetention:
    """One embedded topic, as one of its workers sees it."""

    def __init__(
        self,
        topic: str,
        found: TrimmableLog,
        *,
        partition_count: int,
        created_at_ms: Callable[[bytes], int],
        retention_ms: int,
        bytes_max: int,
        clock: Clock,
    ) -> None:
        """`bytes_max` is the topic's; a worker answers for its share of the partitions."""
        self.full = False
        """The partitions of the last round took more than their share when it ended."""
        self._topic = topic
        self._log = found
        self._partition_count = partition_count
        self._created_at_ms = created_at_ms
        self._retention_ms = retention_ms
        self._bytes_max = bytes_max
        self._clock = clock

    async def run_once(self, safe_offsets: Mapping[int, int]) -> int:
        """Trim partitions, each below its safe offset at most; how many records went. StoreError when the server does
        not answer: `full` then keeps its value."""
        share_bytes = self._bytes_max * len(safe_offsets) // self._partition_count
        crowded = await self._measure(safe_offsets) > share_bytes * EARLY_TRIM_RATIO
        dropped = 0
        for partition, safe_offset in safe_offsets.items():
            dropped += await self._trim(partition, safe_offset, early=crowded)
        full = crowded and await self._measure(safe_offsets) > share_bytes
        if full != self.full:
            log.warning("log_room_changed", name=self._topic, state="full" if full else "ok", limit=share_bytes)
        self.full = full
        if dropped:
            metrics.LOG_TRIMMED_TOTAL.labels(topic=self._topic).inc(dropped)
        return dropped

    async def _measure(self, partitions: Mapping[int, int]) -> int:
        total_bytes = 0
        for partition in partitions:
            total_bytes += await self._log.stored_bytes(partition)
        metrics.LOG_BYTES.labels(topic=self._topic).set(total_bytes)
        return total_bytes

    async def _trim(self, partition: int, safe_offset: int, *, early: bool) -> int:
        low, high = await self._log.watermarks(partition)
        if safe_offset > high:
            raise StoreError(f"log {self._topic}/{partition}: safe offset {safe_offset} is above the next, {high}")
        if safe_offset <= low:
            return 0
        bound = safe_offset if early else await self._first_kept(partition, low, safe_offset)
        return await self._log.trim(partition, bound) if bound > low else 0

    async def _first_kept(self, partition: int, low: int, safe_offset: int) -> int:
        """The first offset from `low` on whose record is younger than the retention, at most `safe_offset`."""
        oldest_ms = self._clock.unix_ms() - self._retention_ms
        if not await self._is_older(partition, low, oldest_ms):
            return low
        old, kept = low, safe_offset  # `old` is older, `kept` is not or is the end
        while old + 1 < kept:
            middle = (old + kept) // 2
            if await self._is_older(partition, middle, oldest_ms):
                old = middle
            else:
                kept = middle
        return kept

    async def _is_older(self, partition: int, offset: int, oldest_ms: int) -> bool:
        (record,) = await self._log.read(partition, offset, max_records=1)
        return self._created_at_ms(record.value) < oldest_ms
