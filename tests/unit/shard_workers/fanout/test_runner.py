"""FanoutRole on models; its work together with the mailboxes is in mailbox/test_runner.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from qim.commit_log.api import AppendRun, LogRecord
from qim.core import ids
from qim.errors import Fenced, StoreError, StoreUnavailable
from qim.protocol.qim_pb2 import GroupDispatch, LogHint, OutboxRecord
from qim.shard_workers.fanout.runner import contiguous_hints, created_at_ms
from tests.unit.shard_workers.pipeline import BUCKETS, SHARDS, TENANT, Pipeline, eventually

AB = ids.direct_conversation_id("alice", "bob")
BOB_SHARD = ids.mailbox_shard_id(TENANT, "bob", SHARDS)


@pytest.fixture
async def world() -> AsyncIterator[Pipeline]:
    pipeline = Pipeline()
    yield pipeline
    await pipeline.close()


async def sources(world: Pipeline) -> list[int]:
    """Outbox offsets in the dispatch partition of bob, in log order."""
    records = await world.dispatch_log.read(BOB_SHARD, 0)
    return [GroupDispatch.FromString(record.value).source_offset for record in records]


async def dispatched(world: Pipeline, count: int) -> None:
    async def there() -> bool:
        return len(await sources(world)) >= count

    await eventually(there)


async def test_a_refused_append_is_repeated_in_order(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    append = world.dispatch_log.append_each
    failures = 3

    async def failing(runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        nonlocal failures
        if failures:
            failures -= 1
            if failures == 1:
                await append(runs)
            raise StoreUnavailable("no answer")
        return await append(runs)

    monkeypatch.setattr(world.dispatch_log, "append_each", failing)
    await world.start_fanout()
    for n in range(3):
        await world.send(AB, "alice", f"{n}")
    await dispatched(world, 4)
    found = await sources(world)
    assert sorted(set(found)) == [0, 1, 2]
    last = [found.index(n) for n in (0, 1, 2)]
    assert last == sorted(last)


async def test_an_append_that_ends_after_its_partition_was_fenced_harms_nobody(
    world: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = world.dispatch_log.append_each
    fenced, ended = asyncio.Event(), asyncio.Event()

    async def save(*_: int) -> None:
        fenced.set()
        raise Fenced("another fan-out owns the partition")

    async def slow(runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        if await sources(world):
            await fenced.wait()
            await asyncio.sleep(0.01)
            ended.set()
        return await append(runs)

    monkeypatch.setattr(world.checkpoints, "save", save)
    monkeypatch.setattr(world.dispatch_log, "append_each", slow)
    await world.start_fanout()
    for n in range(2):
        await world.send(AB, "alice", f"{n}")
        await dispatched(world, 1)
    await asyncio.wait_for(ended.wait(), 5)
    await dispatched(world, 2)
    await asyncio.sleep(0.01)
    assert [type(error) for _, error in world.failures] == [Fenced]


async def test_an_unreadable_partition_holds_up_no_other(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ids.conversation_bucket(TENANT, AB, BUCKETS)
    read = world.outbox.read

    async def failing(partition: int, offset: int, **limits: int) -> list[LogRecord]:
        if partition == broken and limits["max_records"] > 1:
            raise StoreUnavailable("down")
        return await read(partition, offset, **limits)

    monkeypatch.setattr(world.outbox, "read", failing)
    await world.start_fanout()
    pairs = [ids.direct_conversation_id(f"v{n}", f"w{n}") for n in range(99)]
    other = next(pair for pair in pairs if ids.conversation_bucket(TENANT, pair, BUCKETS) != broken)
    world.writer.lose = lambda opcode: True
    await world.send(AB, "alice", "stuck")
    await world.send(other, ids.direct_members(other)[0], "fine")

    async def buckets() -> set[int]:
        return {
            GroupDispatch.FromString(record.value).source_bucket
            for shard in range(SHARDS)
            for record in await world.dispatch_log.read(shard, 0)
        }

    async def there() -> bool:
        return bool(await buckets())

    await eventually(there)
    assert await buckets() == {ids.conversation_bucket(TENANT, other, BUCKETS)}


async def test_where_runs_end_apart_one_that_hangs_holds_up_no_other(
    world: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = world.dispatch_log.append_each
    away = ids.conversation_bucket(TENANT, AB, BUCKETS)
    back = asyncio.Event()

    async def hanging(runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        if any(run.fence is not None and run.fence.source_partition == away for run in runs):
            await back.wait()
        return await append(runs)

    monkeypatch.setattr(world.dispatch_log, "append_each", hanging)
    monkeypatch.setattr(type(world.dispatch_log), "ends_together", False)
    await world.start_fanout()
    pairs = [ids.direct_conversation_id(f"v{n}", f"w{n}") for n in range(99)]
    other = next(pair for pair in pairs if ids.conversation_bucket(TENANT, pair, BUCKETS) != away)
    for n in range(3):
        await world.send(AB, "alice", f"stuck {n}")
        await world.send(other, ids.direct_members(other)[0], f"fine {n}")

    async def found(bucket: int) -> int:
        records = [record for shard in range(SHARDS) for record in await world.dispatch_log.read(shard, 0)]
        frames = [GroupDispatch.FromString(record.value) for record in records]
        return len({frame.source_offset for frame in frames if frame.source_bucket == bucket})

    async def fine() -> bool:
        return await found(ids.conversation_bucket(TENANT, other, BUCKETS)) == 3

    await eventually(fine)
    assert await found(away) == 0
    back.set()
    await dispatched(world, 3)


async def test_drain_leaves_nothing_undispatched_and_the_checkpoint_up_to_date(world: Pipeline) -> None:
    role = await world.start_fanout()
    for n in range(20):
        await world.send(AB, "alice", f"{n}")
    await asyncio.sleep(0)
    await role.drain()
    assert await sources(world) == list(range(20))
    bucket = ids.conversation_bucket(TENANT, AB, BUCKETS)
    assert world.checkpoints._positions[bucket].next_offset == 20
    assert role.ready()
    await role.stop()
    assert not role.ready()


def test_hints_are_cut_where_offsets_jump() -> None:
    hints = [LogHint.FromString(packed) for packed in contiguous_hints(3, [(5, b"a"), (6, b"b"), (9, b"c")])]
    assert [(hint.partition, hint.first_offset, list(hint.records)) for hint in hints] == [
        (3, 5, [b"a", b"b"]),
        (3, 9, [b"c"]),
    ]


def test_the_age_of_a_record_is_that_of_its_commit() -> None:
    assert created_at_ms(LogRecord(0, OutboxRecord(created_at=123).SerializeToString())) == 123
