"""The outbox relay between models of the stream and the topic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest

from qim.commit_log.api import LogIdentity, LogRecord, Watermarks
from qim.commit_log.kafka_outbox import KafkaOutbox
from qim.commit_log.memory import MemoryCommitLog
from qim.core.ids import conversation_bucket
from qim.errors import StoreUnavailable
from qim.runtime.clock import SystemClock
from qim.shard_workers.conversation.relay import RUN_BYTES_MAX, RUN_RECORDS_MAX, OutboxRelay, take_run
from tests.unit.shard_workers.conversation.test_runner import BUCKETS, DM, ModelBench, until

IDENTITY = LogIdentity(cluster_id="c", topic_id="t", partition_count=2)
BUCKET = 1


class ManualClock:
    now_ms = 1000.0

    def unix_ms(self) -> int:
        return int(self.now_ms)

    def monotonic_ms(self) -> float:
        return self.now_ms


class Topic(KafkaOutbox):
    """A broker that can be away, and one that forgets to answer."""

    def __init__(self, log: MemoryCommitLog) -> None:
        super().__init__(log)
        self.here = asyncio.Event()
        self.here.set()
        self.unanswered = 0
        self.runs: list[tuple[int, int]] = []

    async def append_run(self, partition: int, first_offset: int, records: Sequence[bytes]) -> None:
        await self.here.wait()
        await super().append_run(partition, first_offset, records)
        self.runs.append((first_offset, len(records)))
        if self.unanswered:
            self.unanswered -= 1
            raise StoreUnavailable("no answer")


class Scene:
    """One bucket: its stream, the topic, what fan-out was told."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stream = MemoryCommitLog(IDENTITY)
        self.topic_log = MemoryCommitLog(IDENTITY)
        self.topic = Topic(self.topic_log)
        self.hints: list[tuple[int, int]] = []
        self.failures: list[str] = []
        self.relay = self.new_relay()

    def new_relay(self) -> OutboxRelay:
        return OutboxRelay(
            self.stream,
            self.topic,
            clock=self.clock,
            on_failure=lambda task, error: self.failures.append(task),
            keep_ms=600_000,
            trim_interval_ms=1,
        )

    async def start(self) -> None:
        await self.relay.start(
            [BUCKET], lambda _, first_offset, records: self.hints.append((first_offset, len(records)))
        )

    async def commit(self, count: int, *, told: bool = True) -> None:
        values = [b"record"] * count
        first_offset = (await self.stream.append([(BUCKET, value) for value in values]))[0]
        if told:
            self.relay.offer(BUCKET, first_offset, values)

    async def copied(self) -> list[LogRecord]:
        return await KafkaOutbox(self.topic_log).read(BUCKET, 0, max_records=100_000, max_bytes=1 << 30)


@pytest.fixture
async def scene() -> Scene:
    return Scene()


async def test_commits_reach_the_topic_and_only_then_fanout(scene: Scene) -> None:
    await scene.start()
    scene.topic.here.clear()
    await scene.commit(2)
    await asyncio.sleep(0)
    await scene.commit(3)
    for _ in range(5):
        await asyncio.sleep(0)
    assert scene.hints == []
    scene.clock.now_ms += 700
    assert scene.relay.lag_ms(BUCKET) == 700
    scene.topic.here.set()
    await scene.relay.drain()
    assert scene.hints[0][0] == 0
    assert sum(count for _, count in scene.hints) == 5
    assert scene.relay.lag_ms(BUCKET) == 0
    assert [found.offset for found in await scene.copied()] == [0, 1, 2, 3, 4]
    await scene.relay.stop()
    assert scene.failures == []


async def test_what_it_was_not_told_it_reads_from_the_stream(scene: Scene) -> None:
    await scene.commit(700, told=False)
    await scene.start()
    await scene.commit(1, told=False)
    await scene.commit(1)
    async with asyncio.timeout(5):
        while len(await scene.copied()) < 702:
            await asyncio.sleep(0)
    assert max(count for _, count in scene.topic.runs) <= RUN_RECORDS_MAX
    await scene.relay.stop()


async def test_a_start_goes_on_behind_the_topics_tail(scene: Scene) -> None:
    await scene.start()
    await scene.commit(4)
    await scene.relay.drain()
    await scene.relay.stop()
    await scene.commit(3, told=False)
    scene.relay = scene.new_relay()
    await scene.start()
    async with asyncio.timeout(5):
        while len(await scene.copied()) < 7:
            await asyncio.sleep(0)
    assert scene.topic.runs == [(0, 4), (4, 3)]
    await scene.relay.stop()


async def test_a_topic_that_lost_its_newest_records_is_filled_up_again(scene: Scene) -> None:
    await scene.start()
    await scene.commit(4)
    await scene.relay.drain()
    await scene.relay.stop()
    scene.topic_log = MemoryCommitLog(IDENTITY)
    scene.topic = Topic(scene.topic_log)
    scene.relay = scene.new_relay()
    await scene.start()
    async with asyncio.timeout(5):
        while len(await scene.copied()) < 4:
            await asyncio.sleep(0)
    await scene.relay.stop()


async def test_a_run_without_an_answer_is_repeated_and_readers_see_it_once(scene: Scene) -> None:
    await scene.start()
    scene.topic.unanswered = 1
    await scene.commit(2)
    await scene.relay.drain()
    assert scene.topic.runs == [(0, 2), (0, 2)]
    assert scene.hints == [(0, 2)]
    assert len(await scene.copied()) == 2
    await scene.relay.stop()


async def test_redis_keeps_a_record_ten_minutes_after_the_topic_has_it(scene: Scene) -> None:
    await scene.start()
    await scene.commit(3)
    await scene.relay.drain()
    await ticks(scene)
    scene.clock.now_ms += 599_000
    await scene.commit(2)
    await scene.relay.drain()
    await ticks(scene)
    assert await scene.stream.watermarks(BUCKET) == Watermarks(0, 5)
    scene.clock.now_ms += 1_000
    await ticks(scene)
    assert await scene.stream.watermarks(BUCKET) == Watermarks(3, 5)
    scene.clock.now_ms += 600_000
    await ticks(scene)
    assert await scene.stream.watermarks(BUCKET) == Watermarks(5, 5)
    await scene.relay.stop()


async def ticks(scene: Scene) -> None:
    """A few rounds of the trim task, whose interval is 1 ms here."""
    for _ in range(4):
        await asyncio.sleep(0.002)


async def test_a_writer_tells_fanout_when_the_topic_has_the_records() -> None:
    bench = ModelBench()
    identity = LogIdentity(cluster_id="c", topic_id="t", partition_count=BUCKETS)
    topic = Topic(MemoryCommitLog(identity))
    stream = MemoryCommitLog(identity, records_of=bench.model.outbox)
    bench.writer._relay = OutboxRelay(
        stream, topic, clock=SystemClock(), on_failure=lambda task, error: bench.failures.append(error)
    )
    await bench.start()
    topic.here.clear()
    await bench.acked("line")
    await bench.create("bob")
    for _ in range(10):
        await asyncio.sleep(0)
    assert bench.hints == []
    topic.here.set()
    await bench.writer.drain()
    await until(lambda: len(bench.hinted()) == 2)
    bucket = conversation_bucket("t", DM, BUCKETS)
    assert [found.value for found in await topic.read(bucket, 0)] == bench.model.outbox(bucket)
    await bench.close()
    assert bench.failures == []


def test_a_run_is_bounded_by_records_and_bytes() -> None:
    small = deque(LogRecord(n, b"x") for n in range(RUN_RECORDS_MAX + 3))
    assert [len(take_run(small)), len(take_run(small)), len(take_run(small))] == [RUN_RECORDS_MAX, 3, 0]
    large = deque(LogRecord(n, bytes(RUN_BYTES_MAX)) for n in range(2))
    assert [len(take_run(large)), len(take_run(large))] == [1, 1]
    assert take_run(large) == []
