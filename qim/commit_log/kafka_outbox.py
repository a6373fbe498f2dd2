"""The outbox on Kafka: what the writer's relay copies from a bucket's stream, read by the offsets of that stream.

One Kafka record is a run: be64 offset of its first outbox record, then be32 length and bytes of each. A run is in the
topic whole or not at all, and its relay appends the next one only when it is there, so every offset below a run's last
one is in the topic before it, whatever crashes. A relay that starts over, or a replaced one that is late, repeats runs;
they are passed over. The offsets of the topic itself mean nothing: the source of a record is its offset in the stream
everywhere (DESIGN-data §4).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from qim.commit_log.api import CommitLog, LogIdentity, LogRecord, Watermarks
from qim.errors import StoreError

_FIRST: Final = struct.Struct(">Q")
_LENGTH: Final = struct.Struct(">I")
_RUNS_PER_READ: Final = 64
_SEARCH_RUNS: Final = 64
"""A position is looked for among so many of the newest runs, then eight times further back, and so on. Far more than
relays that were replaced can repeat late, one run each: the end of the topic is not taken from such a run."""
_SEARCH_FACTOR: Final = 8


class Run(NamedTuple):
    first_offset: int
    records: list[bytes]

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.records)


class _Cursor:
    """Where the reader of a partition is."""

    __slots__ = ("next_offset", "surplus", "topic_offset")

    def __init__(self, next_offset: int, topic_offset: int) -> None:
        self.next_offset = next_offset
        """Of the stream: the record the next read begins with."""
        self.topic_offset = topic_offset
        """The next run to read."""
        self.surplus: deque[LogRecord] = deque()
        """Read and not yet returned, from `next_offset` on."""


class KafkaOutbox:
    """A `qim.commit_log.api.LogReader`, and the relay's side: `next_offset` and `append_run`."""

    def __init__(self, log: CommitLog) -> None:
        """`log` is the topic of runs."""
        self._log = log
        self._cursors: dict[int, _Cursor] = {}

    async def identity(self) -> LogIdentity:
        return await self._log.identity()

    async def watermarks(self, partition: int) -> Watermarks:
        """Of the stream. StoreError when the topic's retention has taken every run: nothing tells where it goes on."""
        low, high = await self._log.watermarks(partition)
        if low == high:
            if high:
                raise StoreError(f"outbox {partition}: the topic's retention has taken every record")
            return Watermarks(0, 0)
        first, last = await self._run_at(partition, low), await self._run_at(partition, high - 1)
        return Watermarks(first.first_offset, last.next_offset)

    async def append_run(self, partition: int, first_offset: int, records: Sequence[bytes]) -> None:
        """Durable when it returns; one call per partition at a time. Waits for a broker that is away."""
        await self._log.append([(partition, pack_run(first_offset, records))])

    async def next_offset(self, partition: int) -> int | None:
        """Stream offset after the last run, None when the topic holds none (new, or older than its retention)."""
        low, high = await self._log.watermarks(partition)
        return (await self._run_at(partition, high - 1)).next_offset if low < high else None

    async def read(
        self, partition: int, offset: int, *, max_records: int = 500, max_bytes: int = 4 << 20
    ) -> list[LogRecord]:
        """StoreError when the topic goes on behind `offset`, or ends before it while it holds runs at all."""
        cursor = self._cursors.pop(partition, None)
        if cursor is None or cursor.next_offset > offset:
            cursor = await self._find(partition, offset)
        await self._pass_over(partition, cursor, offset)
        found: list[LogRecord] = []
        taken_bytes = 0
        while len(found) < max_records and taken_bytes < max_bytes:
            if not cursor.surplus and not await self._fill(partition, cursor):
                break
            record = cursor.surplus.popleft()
            found.append(record)
            taken_bytes += len(record.value)
            cursor.next_offset += 1
        self._cursors[partition] = cursor
        return found

    async def _pass_over(self, partition: int, cursor: _Cursor, offset: int) -> None:
        """Go on to `offset`: its reader had what lies between as hints."""
        while cursor.next_offset < offset:
            if not cursor.surplus and not await self._fill(partition, cursor):
                raise StoreError(self._lost(partition, offset, cursor.next_offset))
            cursor.surplus.popleft()
            cursor.next_offset += 1

    async def _fill(self, partition: int, cursor: _Cursor) -> bool:
        """Read on until there is a record at `next_offset`; False at the end of the topic."""
        while not cursor.surplus:
            runs = await self._log.read(partition, cursor.topic_offset, max_records=_RUNS_PER_READ)
            if not runs:
                return False
            at = cursor.next_offset
            for topic_offset, value in runs:
                run = unpack_run(value)
                if run.first_offset > at:
                    raise StoreError(self._lost(partition, at, run.first_offset))
                cursor.surplus.extend(
                    LogRecord(offset, run.records[offset - run.first_offset]) for offset in range(at, run.next_offset)
                )
                at = max(at, run.next_offset)
                cursor.topic_offset = topic_offset + 1
        return True

    async def _find(self, partition: int, offset: int) -> _Cursor:
        """A cursor at `offset`. Runs ascend but for repeated ones, so the newest are tried first."""
        low, high = await self._log.watermarks(partition)
        reach = _SEARCH_RUNS
        while low < high:
            start = max(low, high - reach)
            first, at, end = await self._scan(partition, start, offset)
            if first <= offset < end:
                return _Cursor(offset, at)
            if first <= offset == end:
                return _Cursor(offset, at + 1)
            if start == low:
                raise StoreError(self._lost(partition, offset, first if first > offset else end))
            reach *= _SEARCH_FACTOR
        return _Cursor(offset, high)

    async def _scan(self, partition: int, start: int, offset: int) -> tuple[int, int, int]:
        """From run `start` on to the one that holds `offset`, or to the end: the first stream offset seen, topic offset
        of the last run seen, and where the stream's records end there. It stops where the stream skips `offset`."""
        first, end, at = -1, 0, start
        while runs := await self._log.read(partition, at, max_records=_RUNS_PER_READ):
            for topic_offset, value in runs:
                run = unpack_run(value)
                if first < 0:
                    first = end = run.first_offset
                if run.first_offset > end:
                    # The scan began at a repeated run: what is missing lies before it.
                    return offset + 1, topic_offset, end
                end = max(end, run.next_offset)
                at = topic_offset + 1
                if end > offset:
                    return first, topic_offset, end
        return first, at - 1, end

    async def _run_at(self, partition: int, topic_offset: int) -> Run:
        (record,) = await self._log.read(partition, topic_offset, max_records=1)
        return unpack_run(record.value)

    def _lost(self, partition: int, offset: int, found: int) -> str:
        return f"outbox {partition}: the topic has no record {offset}, it is at {found}"


def pack_run(first_offset: int, records: Sequence[bytes]) -> bytes:
    """Value of one Kafka record."""
    parts = [_FIRST.pack(first_offset)]
    for record in records:
        parts += (_LENGTH.pack(len(record)), record)
    return b"".join(parts)


def unpack_run(value: bytes) -> Run:
    """StoreError for bytes that are no run."""
    records: list[bytes] = []
    at = _FIRST.size
    try:
        (first_offset,) = _FIRST.unpack_from(value)
        while at < len(value):
            (length,) = _LENGTH.unpack_from(value, at)
            at += _LENGTH.size + length
            records.append(value[at - length : at])
    except struct.error:
        at = -1
    if at != len(value) or not records:
        raise StoreError("a record of the outbox topic is not one of ours")
    return Run(first_offset, records)
