from __future__ import annotations

import struct

import pytest

from qim.commit_log.api import LogIdentity
from qim.commit_log.memory import MemoryCommitLog
from qim.errors import StoreError
from qim.shard_workers.log_retention import LogRetention

RETENTION_MS = 1_000
RECORD_BYTES = 100


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0

    def unix_ms(self) -> int:
        return self.now_ms

    def monotonic_ms(self) -> float:
        return float(self.now_ms)


class Scene:
    """A topic of two partitions, one record each 10 ms."""

    def __init__(self, bytes_max: int = 1 << 30) -> None:
        self.clock = Clock()
        self.log = MemoryCommitLog(LogIdentity(cluster_id="c", topic_id="t", partition_count=2))
        self.retention = LogRetention(
            "outbox", self.log, partition_count=2, created_at_ms=lambda value: int(struct.unpack_from(">Q", value)[0]),
            retention_ms=RETENTION_MS, bytes_max=bytes_max, clock=self.clock,
        )  # fmt: skip

    async def write(self, count: int, partition: int = 0) -> None:
        for _ in range(count):
            self.clock.now_ms += 10
            await self.log.append([(partition, struct.pack(">Q", self.clock.now_ms).ljust(RECORD_BYTES, b"."))])

    async def low(self, partition: int = 0) -> int:
        return (await self.log.watermarks(partition)).low


async def test_records_go_when_they_are_old_and_below_the_safe_offset() -> None:
    scene = Scene()
    await scene.write(200)
    assert await scene.retention.run_once({0: 200, 1: 0}) == 99, "the first 99 are older than a second"
    assert await scene.low() == 99
    assert await scene.retention.run_once({0: 200, 1: 0}) == 0
    scene.clock.now_ms += 10 * RETENTION_MS
    assert await scene.retention.run_once({0: 150, 1: 0}) == 51, "what a consumer has not read stays however old it is"
    assert await scene.low() == 150
    assert await scene.retention.run_once({0: 200, 1: 0}) == 50
    assert await scene.low() == 200


async def test_young_records_stay() -> None:
    scene = Scene()
    await scene.write(50)
    assert await scene.retention.run_once({0: 50}) == 0
    assert not scene.retention.full


async def test_above_three_quarters_of_the_bytes_what_is_read_goes_early() -> None:
    scene = Scene(bytes_max=200 * RECORD_BYTES)
    await scene.write(80)
    assert await scene.retention.run_once({0: 60, 1: 0}) == 0
    assert await scene.retention.run_once({0: 60}) == 60, "of one partition in two, half of the bytes are the share"
    assert not scene.retention.full


async def test_full_when_consumers_are_behind_and_ok_when_they_have_caught_up() -> None:
    scene = Scene(bytes_max=100 * RECORD_BYTES)
    await scene.write(101)
    assert await scene.retention.run_once({0: 0, 1: 0}) == 0
    assert scene.retention.full
    assert await scene.retention.run_once({0: 101, 1: 0}) == 101
    assert not scene.retention.full


async def test_a_safe_offset_above_the_log_is_of_another_log() -> None:
    scene = Scene()
    await scene.write(3)
    with pytest.raises(StoreError, match="above the next"):
        await scene.retention.run_once({0: 4})
