"""The CommitLog contract (§18.2, §19.2.1, DESIGN-data §4).

Partitions are named explicitly; offsets are dense from 0. `append` is durable when it returns and keeps the order
given; one call may carry many partitions. Nothing here subscribes or rebalances: owners read the partitions they lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qim.errors import StoreError


class LogRecord(NamedTuple):
    offset: int
    value: bytes


class Watermarks(NamedTuple):
    low: int
    """Offset of the oldest record still kept."""
    high: int
    """Offset the next record will get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIdentity:
    """Stored beside every checkpoint; a difference fails closed (§3 of store-keys, broker identity)."""

    cluster_id: str
    topic_id: str
    partition_count: int


class Fence(NamedTuple):
    """The append happens only while no greater epoch is stored for this producer's source partition."""

    source_partition: int
    epoch: int


class AppendRun(NamedTuple):
    """What one producer appends: (partition, value) pairs in order, under its fence."""

    fence: Fence | None
    records: Sequence[tuple[int, bytes]]


class LogReader(Protocol):
    """One topic, as its consumers see it."""

    async def read(
        self, partition: int, offset: int, *, max_records: int = 500, max_bytes: int = 4 << 20
    ) -> list[LogRecord]:
        """Records from `offset` on, contiguous, possibly none. StoreError when `offset` is below the low watermark or
        above the high one: never skips, never jumps."""
        ...

    async def watermarks(self, partition: int) -> Watermarks: ...

    async def identity(self) -> LogIdentity: ...


class CommitLog(LogReader, Protocol):
    """One topic, and what its producers do."""

    @property
    def ends_together(self) -> bool:
        """The runs of an `append_each` share one round trip and end with it. False: each ends when its own partitions
        take it, and one of them may be away for minutes; who appends for others should not wait for it with them."""
        ...

    async def append(self, records: Sequence[tuple[int, bytes]], fence: Fence | None = None) -> list[int]:
        """Append (partition, value) pairs, offsets in the order given. Fenced: nothing appended; a broker cannot
        enforce that, see `kafka`. StoreUnavailable: of each partition any prefix may have been appended; the caller
        repeats and consumers drop duplicates by source."""
        ...

    async def append_each(self, runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        """`append` of many producers: for each, in order, its offsets, or why it was refused: Fenced, and nothing of it
        is appended; any other, and a prefix of it may be. A refusal of one touches no other.
        StoreUnavailable is raised: of each partition any prefix of each run may have been appended."""
        ...


class TrimmableLog(LogReader, Protocol):
    """A topic whose records are dropped by us, not by a broker."""

    async def watermarks(self, partition: int) -> Watermarks: ...

    async def trim(self, partition: int, safe_offset: int) -> int:
        """Drop records below `safe_offset`, which the caller took as the minimum of everything that may still be read
        (DESIGN-data §4); how many went. StoreError above the high watermark: such a floor is not of this log."""
        ...

    async def stored_bytes(self, partition: int) -> int:
        """Memory the partition takes, within some 10 %."""
        ...


class CheckpointStore(Protocol):
    """Positions of fan-out per outbox partition (instance core)."""

    async def open_partition(self, partition: int, fanout_epoch: int, grant_id: str) -> int:
        """Raise the stored epoch; the next offset to read. Fenced as everywhere."""
        ...

    async def save(self, partition: int, fanout_epoch: int, next_offset: int) -> None:
        """Move forward only; Fenced when a greater epoch is stored. A smaller offset changes nothing."""
        ...

    async def position(self, partition: int) -> int:
        """The offset saved last, whoever owns the partition; 0 when there is none."""
        ...
