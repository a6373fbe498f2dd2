"""Models of the CommitLog and the CheckpointStore, for property tests and the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from qim.commit_log.api import AppendRun, Fence, LogIdentity, LogRecord, Watermarks
from qim.errors import Fenced, StoreError


@dataclass(slots=True)
class _Position:
    epoch: int = 0
    grant_id: str = ""
    next_offset: int = 0
    identity: LogIdentity | None = None


class MemoryCheckpointStore:
    """See `qim.commit_log.api.CheckpointStore`."""

    def __init__(self, identity: LogIdentity) -> None:
        self._identity = identity
        self._positions: dict[int, _Position] = {}

    async def open_partition(self, partition: int, fanout_epoch: int, grant_id: str) -> int:
        position = self._positions.setdefault(partition, _Position())
        if position.epoch > fanout_epoch or (position.epoch == fanout_epoch and position.grant_id != grant_id):
            raise Fenced(f"checkpoint {partition}: epoch {position.epoch} is stored")
        if position.identity not in (None, self._identity):
            raise StoreError(f"checkpoint {partition} belongs to {position.identity}")
        position.epoch, position.grant_id, position.identity = fanout_epoch, grant_id, self._identity
        return position.next_offset

    async def save(self, partition: int, fanout_epoch: int, next_offset: int) -> None:
        position = self._positions.setdefault(partition, _Position())
        if position.epoch > fanout_epoch:
            raise Fenced(f"checkpoint {partition}: epoch {position.epoch} is stored")
        if position.epoch < fanout_epoch:
            raise StoreError(f"checkpoint {partition}: epoch {position.epoch} is stored")
        position.next_offset = max(position.next_offset, next_offset)

    async def position(self, partition: int) -> int:
        return self._positions.get(partition, _Position()).next_offset

    def epoch(self, partition: int) -> int:
        """Stored epoch, 0 if the partition was never opened."""
        return self._positions.get(partition, _Position()).epoch

    def adopt(self, other: MemoryCheckpointStore) -> None:
        """Share what another one holds: two clients of one instance."""
        self._positions = other._positions


class MemoryCommitLog:
    """See `qim.commit_log.api.CommitLog`.

    `records_of` gives the list that holds a partition's records (index = offset) when they belong to something else,
    such as the outbox of a MemoryMessageStore; by default the log keeps its own.
    """

    ends_together: Final = True

    def __init__(
        self,
        identity: LogIdentity,
        *,
        records_of: Callable[[int], list[bytes]] | None = None,
        checkpoints: MemoryCheckpointStore | None = None,
    ) -> None:
        self._identity = identity
        own: list[list[bytes]] = [[] for _ in range(identity.partition_count)]
        self._records_of = records_of or own.__getitem__
        self._checkpoints = checkpoints
        self._low = [0] * identity.partition_count

    async def append(self, records: Sequence[tuple[int, bytes]], fence: Fence | None = None) -> list[int]:
        if fence is not None and self._checkpoints is not None:
            stored = self._checkpoints.epoch(fence.source_partition)
            if stored > fence.epoch:
                raise Fenced(f"epoch {stored} of source partition {fence.source_partition} is stored")
        offsets = []
        for partition, value in records:
            kept = self._records_of(partition)
            offsets.append(len(kept))
            kept.append(value)
        return offsets

    async def append_each(self, runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        results: list[list[int] | StoreError] = []
        for run in runs:
            try:
                results.append(await self.append(run.records, run.fence))
            except StoreError as error:
                results.append(error)
        return results

    async def read(
        self, partition: int, offset: int, *, max_records: int = 500, max_bytes: int = 4 << 20
    ) -> list[LogRecord]:
        kept = self._records_of(partition)
        if not self._low[partition] <= offset <= len(kept):
            raise StoreError(f"partition {partition}: no record at offset {offset}, next offset is {len(kept)}")
        found: list[LogRecord] = []
        taken_bytes = 0
        for at in range(offset, min(len(kept), offset + max_records)):
            found.append(LogRecord(at, kept[at]))
            taken_bytes += len(kept[at])
            if taken_bytes >= max_bytes:
                break
        return found

    async def watermarks(self, partition: int) -> Watermarks:
        return Watermarks(self._low[partition], len(self._records_of(partition)))

    async def identity(self) -> LogIdentity:
        return self._identity

    async def trim(self, partition: int, safe_offset: int) -> int:
        """Hide records below `safe_offset`; how many went."""
        if safe_offset > len(self._records_of(partition)):
            raise StoreError(f"partition {partition}: {safe_offset} is above the next offset")
        dropped = max(safe_offset - self._low[partition], 0)
        self._low[partition] += dropped
        return dropped

    async def stored_bytes(self, partition: int) -> int:
        return sum(map(len, self._records_of(partition)[self._low[partition] :]))
