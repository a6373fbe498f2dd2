"""What every CommitLog and CheckpointStore does (DESIGN-data §4)."""

from __future__ import annotations

from typing import Final, Protocol

import pytest

from qim.commit_log.api import AppendRun, CheckpointStore, CommitLog, Fence, LogRecord, Watermarks
from qim.errors import Fenced, StoreError

PARTITIONS: Final = 4
CLUSTER: Final = "cluster-1"


class TrimmableLog(CommitLog, Protocol):
    async def trim(self, partition: int, safe_offset: int) -> int: ...


class MeasuredLog(TrimmableLog, Protocol):
    async def stored_bytes(self, partition: int) -> int: ...


class CommitLogContract:
    """Subclasses give `log`, `checkpoints` bound to it and `foreign_checkpoints` of a log that was made anew."""

    log: TrimmableLog
    cluster_id = CLUSTER
    checkpoints: CheckpointStore
    foreign_checkpoints: CheckpointStore

    async def test_offsets_are_dense_from_zero_in_the_order_given(self) -> None:
        assert await self.log.append([(0, b"a"), (2, b"x"), (0, b"b")]) == [0, 0, 1]
        assert await self.log.append([(0, b"c"), (2, b"y")]) == [2, 1]
        assert await self.log.read(0, 0) == [LogRecord(0, b"a"), LogRecord(1, b"b"), LogRecord(2, b"c")]
        assert await self.log.read(2, 1) == [LogRecord(1, b"y")]
        assert await self.log.read(1, 0) == []
        assert await self.log.append([]) == []

    async def test_producers_share_a_call(self) -> None:
        runs = [
            AppendRun(Fence(1, 1), [(0, b"a"), (1, b"b")]), AppendRun(None, []), AppendRun(None, [(0, b"c"), (0, b"d")])
        ]  # fmt: skip
        assert await self.log.append_each(runs) == [[0, 0], [], [1, 2]]
        assert [record.value for record in await self.log.read(0, 0)] == [b"a", b"c", b"d"]
        assert await self.log.append_each([AppendRun(None, [])]) == [[]]
        assert await self.log.append([(0, b"e")]) == [3]

    async def test_reads_are_bounded_and_contiguous(self) -> None:
        await self.log.append([(1, bytes((i % 251,)) * 10) for i in range(400)])
        assert [record.offset for record in await self.log.read(1, 10, max_records=5)] == [10, 11, 12, 13, 14]
        assert [record.offset for record in await self.log.read(1, 3, max_bytes=25)] == [3, 4, 5]
        assert len(await self.log.read(1, 0, max_bytes=1)) == 1
        everything = await self.log.read(1, 0)
        assert [record.offset for record in everything] == list(range(400))
        assert all(record.value == bytes((record.offset % 251,)) * 10 for record in everything)
        assert await self.log.read(1, 400) == []

    async def test_reading_outside_the_watermarks_fails_and_never_jumps(self) -> None:
        await self.log.append([(0, b"%d" % i) for i in range(10)])
        with pytest.raises(StoreError):
            await self.log.read(0, 11)
        assert await self.log.trim(0, 4) == 4
        assert await self.log.trim(0, 2) == 0
        assert await self.log.watermarks(0) == Watermarks(4, 10)
        with pytest.raises(StoreError):
            await self.log.read(0, 3)
        assert [record.offset for record in await self.log.read(0, 4)] == [4, 5, 6, 7, 8, 9]

    async def test_trimming_everything_keeps_the_offsets(self) -> None:
        await self.log.append([(0, b"a"), (0, b"b")])
        with pytest.raises(StoreError):
            await self.log.trim(0, 3)
        assert await self.log.trim(0, 2) == 2
        assert await self.log.watermarks(0) == Watermarks(2, 2)
        with pytest.raises(StoreError):
            await self.log.read(0, 1)
        assert await self.log.read(0, 2) == []
        assert await self.log.append([(0, b"c")]) == [2]
        assert await self.log.read(0, 2) == [LogRecord(2, b"c")]

    async def test_watermarks_of_an_empty_partition(self) -> None:
        assert await self.log.watermarks(3) == Watermarks(0, 0)

    async def test_identity_is_stable(self) -> None:
        first = await self.log.identity()
        assert await self.log.identity() == first
        assert (first.cluster_id, first.partition_count) == (self.cluster_id, PARTITIONS)
        assert first.topic_id

    # --------------------------------------------------------------------------------------------------- checkpoints

    async def test_a_position_starts_at_zero_and_only_moves_forward(self) -> None:
        assert await self.checkpoints.open_partition(0, 1, "g1") == 0
        await self.checkpoints.save(0, 1, 5)
        await self.checkpoints.save(0, 1, 3)
        assert await self.checkpoints.position(0) == 5
        assert await self.checkpoints.position(1) == 0
        assert await self.checkpoints.open_partition(0, 1, "g1") == 5
        assert await self.checkpoints.open_partition(0, 2, "g2") == 5

    async def test_a_replaced_owner_moves_no_position(self) -> None:
        await self.checkpoints.open_partition(0, 2, "g2")
        with pytest.raises(Fenced):
            await self.checkpoints.open_partition(0, 1, "g1")
        with pytest.raises(Fenced):
            await self.checkpoints.open_partition(0, 2, "other")
        with pytest.raises(Fenced):
            await self.checkpoints.save(0, 1, 9)
        assert await self.checkpoints.open_partition(0, 2, "g2") == 0

    async def test_a_partition_nobody_opened_takes_no_position(self) -> None:
        with pytest.raises(StoreError):
            await self.checkpoints.save(0, 1, 9)

    async def test_a_position_of_another_log_fails_closed(self) -> None:
        await self.checkpoints.open_partition(0, 1, "g1")
        await self.checkpoints.save(0, 1, 5)
        with pytest.raises(StoreError):
            await self.foreign_checkpoints.open_partition(0, 2, "g2")
        assert await self.checkpoints.open_partition(0, 2, "g2") == 5


class FencedLogContract(CommitLogContract):
    """Logs that judge a fence and append in one step, and that we trim; a broker does neither."""

    log: MeasuredLog

    async def test_stored_bytes_follow_what_is_kept(self) -> None:
        empty = await self.log.stored_bytes(1)
        await self.log.append([(1, bytes(1_000))] * 1_000)
        full = await self.log.stored_bytes(1)
        assert 0.9e6 < full - empty < 2e6
        await self.log.trim(1, 900)
        assert await self.log.stored_bytes(1) < full / 4

    async def test_a_replaced_producer_appends_nothing(self) -> None:
        await self.checkpoints.open_partition(7, 1, "g1")
        assert await self.log.append([(0, b"a")], Fence(7, 1)) == [0]
        await self.checkpoints.open_partition(7, 2, "g2")
        with pytest.raises(Fenced):
            await self.log.append([(0, b"late"), (1, b"late")], Fence(7, 1))
        assert await self.log.append([(0, b"b"), (1, b"c")], Fence(7, 2)) == [1, 0]
        assert [record.value for record in await self.log.read(0, 0)] == [b"a", b"b"]
        # another source partition has a fence of its own
        assert await self.log.append([(1, b"d")], Fence(8, 1)) == [1]

    async def test_a_replaced_producer_takes_no_other_with_it(self) -> None:
        for partition, epoch in ((6, 1), (7, 2), (8, 1)):
            await self.checkpoints.open_partition(partition, epoch, "g")
        first, fenced, last = await self.log.append_each(
            [
                AppendRun(Fence(6, 1), [(0, b"a")]),
                AppendRun(Fence(7, 1), [(0, b"late"), (1, b"late")]),
                AppendRun(Fence(8, 1), [(1, b"b"), (0, b"c")]),
            ]
        )
        assert isinstance(fenced, Fenced)
        assert (first, last) == ([0], [0, 1])
        assert [record.value for record in await self.log.read(0, 0)] == [b"a", b"c"]
