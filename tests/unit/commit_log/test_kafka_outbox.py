"""KafkaOutbox over the model of a topic: positions are those of the stream, whatever the topic repeats."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.commit_log.api import LogIdentity, LogRecord, Watermarks
from qim.commit_log.kafka_outbox import KafkaOutbox, pack_run, unpack_run
from qim.commit_log.memory import MemoryCommitLog
from qim.errors import StoreError

IDENTITY = LogIdentity(cluster_id="c", topic_id="t", partition_count=2)


def record(offset: int) -> bytes:
    return b"record %d" % offset


def made() -> tuple[KafkaOutbox, MemoryCommitLog]:
    topic = MemoryCommitLog(IDENTITY)
    return KafkaOutbox(topic), topic


async def append(outbox: KafkaOutbox, first_offset: int, count: int) -> None:
    await outbox.append_run(1, first_offset, [record(first_offset + n) for n in range(count)])


def records(first_offset: int, end: int) -> list[LogRecord]:
    return [LogRecord(offset, record(offset)) for offset in range(first_offset, end)]


@given(st.integers(0, 2**63), st.lists(st.binary(max_size=300), min_size=1))
def test_a_run_reads_back(first_offset: int, values: list[bytes]) -> None:
    run = unpack_run(pack_run(first_offset, values))
    assert (run.first_offset, run.records, run.next_offset) == (first_offset, values, first_offset + len(values))


@pytest.mark.parametrize(
    "value", [b"", b"short", pack_run(1, []), pack_run(1, [b"abc"])[:-1], pack_run(1, [b"a"]) + b"x"]
)
def test_what_is_no_run_is_refused(value: bytes) -> None:
    with pytest.raises(StoreError):
        unpack_run(value)


async def test_an_empty_topic_is_at_the_beginning() -> None:
    outbox, _ = made()
    assert await outbox.next_offset(1) is None
    assert await outbox.watermarks(1) == Watermarks(0, 0)
    assert await outbox.read(1, 0) == []
    assert await outbox.identity() == IDENTITY


async def test_reads_go_on_where_the_last_one_ended_and_are_bounded() -> None:
    outbox, _ = made()
    await append(outbox, 0, 10)
    await append(outbox, 10, 5)
    assert await outbox.read(1, 0, max_records=4) == records(0, 4)
    assert await outbox.read(1, 4, max_records=8) == records(4, 12)
    assert len(await outbox.read(1, 12, max_bytes=1)) == 1
    assert await outbox.read(1, 13) == records(13, 15)
    assert await outbox.read(1, 15) == []
    await append(outbox, 15, 2)
    assert await outbox.read(1, 15) == records(15, 17)
    assert await outbox.watermarks(1) == Watermarks(0, 17)
    assert await outbox.next_offset(1) == 17


async def test_a_position_is_found_among_many_runs() -> None:
    outbox, topic = made()
    for first_offset in range(0, 2000, 2):
        await append(outbox, first_offset, 2)
    for offset in (0, 1, 777, 1500, 1998, 1999, 2000):
        assert await KafkaOutbox(topic).read(1, offset) == records(offset, min(offset + 500, 2000))


async def test_a_reader_that_had_hints_goes_on_behind_them() -> None:
    outbox, _ = made()
    await append(outbox, 0, 4)
    assert await outbox.read(1, 0, max_records=1) == records(0, 1)
    await append(outbox, 4, 4)
    await append(outbox, 8, 4)
    assert await outbox.read(1, 9) == records(9, 12)
    assert await outbox.read(1, 12) == []
    with pytest.raises(StoreError, match="no record 13"):
        await outbox.read(1, 13)
    assert await outbox.read(1, 11) == records(11, 12)


async def test_a_late_run_of_a_replaced_relay_is_not_the_end() -> None:
    outbox, topic = made()
    await append(outbox, 0, 8)
    await append(outbox, 8, 2)
    await append(outbox, 10, 2)
    await append(outbox, 8, 2)
    assert await outbox.read(1, 10) == records(10, 12)
    await append(outbox, 12, 1)
    assert await KafkaOutbox(topic).read(1, 10) == records(10, 13)


async def test_a_position_outside_the_topic_fails_closed() -> None:
    outbox, topic = made()
    await append(outbox, 0, 3)
    await append(outbox, 3, 3)
    for offset in (7, 100):
        with pytest.raises(StoreError, match="no record"):
            await outbox.read(1, offset)
    await topic.trim(1, 1)
    with pytest.raises(StoreError, match="no record"):
        await outbox.read(1, 2)
    assert await outbox.read(1, 3) == records(3, 6)
    assert await outbox.watermarks(1) == Watermarks(3, 6)


async def test_a_hole_is_never_read_over() -> None:
    outbox, _ = made()
    await append(outbox, 0, 3)
    assert await outbox.read(1, 0) == records(0, 3)
    await append(outbox, 4, 3)
    with pytest.raises(StoreError, match="no record 3"):
        await outbox.read(1, 3)


async def test_a_topic_that_retention_emptied_is_waited_for() -> None:
    outbox, topic = made()
    await append(outbox, 0, 3)
    await topic.trim(1, 1)
    assert await outbox.next_offset(1) is None
    with pytest.raises(StoreError, match="retention"):
        await outbox.watermarks(1)
    assert await outbox.read(1, 3) == []
    await append(outbox, 3, 1)
    assert await outbox.read(1, 3) == records(3, 4)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=120), st.data())
def test_every_position_is_found_whatever_relays_repeat(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    """Relays start over anywhere at or below the end, and late ones repeat what they had under way."""

    async def run() -> None:
        outbox, topic = made()
        end = 0
        for back, count in steps:
            first_offset = max(0, end - back)
            await append(outbox, first_offset, count)
            end = max(end, first_offset + count)
        start = data.draw(st.integers(0, end))
        reader = KafkaOutbox(topic)
        found: list[LogRecord] = []
        while more := await reader.read(1, start + len(found), max_records=data.draw(st.integers(1, 50))):
            found += more
        assert found == records(start, end)

    asyncio.run(run())
