"""Roles that hold leases, on models: hand-over without a loss, and a store's refusal costs one id, not the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qim.core import ids
from qim.errors import ErrorCode, StoreError, StoreUnavailable
from qim.protocol.qim_pb2 import SHARD_MOVED
from qim.registry.api import LeaseKind
from qim.registry.keeper import LeaseKeeper
from qim.registry.lease import LeaseTimes
from qim.registry.memory import MemoryShardRegistry
from qim.runtime.clock import SystemClock
from qim.shard_workers.conversation.runner import WriterRole
from qim.shard_workers.fanout.runner import FanoutRole
from qim.shard_workers.mailbox.runner import MailboxRole
from qim.stores.api import CommitOutcome
from tests.unit.shard_workers.conversation.test_runner import BUCKETS, DM, ModelBench, until
from tests.unit.shard_workers.pipeline import SHARDS, TENANT, Pipeline, eventually

TIMES = LeaseTimes(renew_ms=100, self_fence_ms=240, ttl_ms=300, failover_wait_ms=500)
"""The contract's, divided by 50."""
AB = ids.direct_conversation_id("alice", "bob")
BUCKET_AB = ids.conversation_bucket(TENANT, AB, BUCKETS)
BOB_SHARD = ids.mailbox_shard_id(TENANT, "bob", SHARDS)


class LeasedPipeline(Pipeline):
    """Fan-out and mailbox workers are members of their pools."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = MemoryShardRegistry(self.clock.monotonic_ms)

    async def start_pair(self, pool: str) -> None:
        for number in (0, 1):
            start = self.start_fanout if pool == "fanout" else self.start_mailbox
            await start(name=f"{pool}-{number}")

    def leases(self, kind: LeaseKind, count: int, name: str) -> LeaseKeeper:
        return LeaseKeeper(
            kind, count, name, "p", registry=self.registry, times=TIMES, clock=self.clock, on_failure=self._failed
        )

    def prepared(self, role: FanoutRole | MailboxRole) -> None:
        kind, count = LeaseKind.MAILBOX_SHARD, SHARDS
        if isinstance(role, FanoutRole):
            kind, count = LeaseKind.OUTBOX_PARTITION, BUCKETS
        role._leases = self.leases(kind, count, role.name)

    def owner_of(self, user: str) -> str:
        held = self.registry._leases[LeaseKind.MAILBOX_SHARD].get(ids.mailbox_shard_id(TENANT, user, SHARDS))
        return held.owner if held and held.owner in self.roles else next(iter(self.roles))


@pytest.fixture
async def world() -> AsyncIterator[LeasedPipeline]:
    pipeline = LeasedPipeline()
    yield pipeline
    await pipeline.close()
    assert pipeline.failures == []


async def arrived(world: LeasedPipeline, texts: list[str]) -> None:
    async def there() -> bool:
        reply = await world.pull("bob")
        return not reply.HasField("error") and len(await world.texts("bob")) >= len(texts)

    await eventually(there)
    assert await world.texts("bob") == texts


def shares(world: LeasedPipeline, pool: str) -> list[list[int]]:
    roles = [world.roles[f"{pool}-{number}"] for number in (0, 1)]
    return [sorted(role._shards if isinstance(role, MailboxRole) else role._partitions) for role in roles]


@pytest.mark.parametrize("pool", ["fanout", "mailbox"])
async def test_shares_move_with_members_and_nothing_is_lost(world: LeasedPipeline, pool: str) -> None:
    other = "mailbox" if pool == "fanout" else "fanout"
    await (world.start_fanout() if other == "fanout" else world.start_mailbox())
    await world.start_pair(pool)
    await eventually(lambda: all(role.ready() for role in world.roles.values()))
    assert shares(world, pool) == [[0, 2], [1, 3]]
    texts = []
    for life in range(3):
        for n in range(10):
            texts.append(f"line {life}/{n}")
            await world.send(AB, "alice", texts[-1])
        name = f"{pool}-{life % 2}"
        leaving = world.roles.pop(name)
        await leaving.drain()
        await leaving.stop()
        stays = world.roles[f"{pool}-{1 - life % 2}"]
        await eventually(lambda role=stays: role.ready() and len(role._leases.held()) == 4)
        texts.append(f"alone {life}")
        await world.send(AB, "alice", texts[-1])
        await (world.start_fanout(name=name) if pool == "fanout" else world.start_mailbox(name=name))
    await arrived(world, texts)


async def test_a_fenced_partition_goes_alone_and_comes_back(world: LeasedPipeline) -> None:
    await world.start_mailbox()
    role = await world.start_fanout()
    await eventually(lambda: role.ready() and len(role._partitions) == BUCKETS)
    await world.send(AB, "alice", "one")
    await arrived(world, ["one"])
    (grant,) = await world.registry.grant(LeaseKind.OUTBOX_PARTITION, [BUCKET_AB], "fanout-9", "other")
    await world.checkpoints.open_partition(BUCKET_AB, grant.epoch, grant.grant_id)
    await world.send(AB, "alice", "two")
    await arrived(world, ["one", "two"])
    assert role._partitions[BUCKET_AB].epoch == grant.epoch + 1
    assert [role._partitions[n].epoch for n in range(BUCKETS) if n != BUCKET_AB] == [1] * (BUCKETS - 1)


async def test_a_fenced_shard_goes_alone_and_comes_back_under_the_next_epoch(world: LeasedPipeline) -> None:
    role = await world.start_mailbox()
    await world.start_fanout()
    await eventually(role.ready)
    await world.send(AB, "alice", "one")
    await arrived(world, ["one"])
    (grant,) = await world.registry.grant(LeaseKind.MAILBOX_SHARD, [BOB_SHARD], "mailbox-9", "other")
    await world.mailbox.open_shard(BOB_SHARD, grant.epoch, grant.grant_id, world.lane_count)
    await world.send(AB, "alice", "two")
    await eventually(
        lambda: BOB_SHARD in role._shards and role._shards[BOB_SHARD].machine.shard_epoch == grant.epoch + 1
    )
    await arrived(world, ["one", "two"])
    assert {runner.machine.shard_epoch for shard, runner in role._shards.items() if shard != BOB_SHARD} == {1}


async def test_a_dropped_shard_forgets_its_devices_and_answers_moved(world: LeasedPipeline) -> None:
    role = await world.start_mailbox()
    await world.start_fanout()
    await eventually(role.ready)
    await world.login("bob", 7)
    assert role._index.of_shard(BOB_SHARD)
    role.drop_shard(BOB_SHARD)
    role.drop_shard(BOB_SHARD)
    assert not role._index.of_shard(BOB_SHARD)
    assert (await world.login("bob", 8)).error.code == SHARD_MOVED


# --------------------------------------------------------------------------------------------------------- the writer


class LeasedBench(ModelBench):
    """The writer is the only member of its pool."""

    def __init__(self) -> None:
        super().__init__()
        self.registry._now_ms = SystemClock().monotonic_ms

    def hold_commits(self, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
        """Commit calls wait until the event is set."""
        gate, commit = asyncio.Event(), self.model.commit_each

        async def held(*args: Any) -> list[list[CommitOutcome] | StoreError]:
            await gate.wait()
            return await commit(*args)

        monkeypatch.setattr(self.model, "commit_each", held)
        return gate

    def new_writer(self) -> WriterRole:
        writer = super().new_writer()
        writer._leases = self.keeper = LeaseKeeper(
            LeaseKind.CONVERSATION_BUCKET, BUCKETS, "writer-0", "core-0", registry=self.registry, times=TIMES,
            clock=SystemClock(), on_failure=lambda task, error: self.failures.append(error),
        )  # fmt: skip
        return writer


@pytest.fixture
async def bench() -> AsyncIterator[LeasedBench]:
    made = LeasedBench()
    await made.start()
    await until(made.writer.ready)
    yield made
    await made.close()
    assert made.failures == []


async def test_a_fenced_bucket_goes_alone_and_its_sender_is_told_to_come_back(bench: LeasedBench) -> None:
    await bench.acked("hello")
    bucket = ids.conversation_bucket("t", DM, BUCKETS)
    (grant,) = await bench.registry.grant(LeaseKind.CONVERSATION_BUCKET, [bucket], "writer-9", "another writer")
    await bench.model.open_bucket(bucket, grant.epoch, "another writer")
    error = await bench.refused("again", own_id="m")
    assert int(error.code) == ErrorCode.REGION_FAILOVER
    other = next(f"dm:ann:u{n}" for n in range(99) if ids.conversation_bucket("t", f"dm:ann:u{n}", BUCKETS) != bucket)
    await bench.acked("elsewhere", to=other)
    await until(bench.writer.ready)
    assert (await bench.acked("again", own_id="m")).conversation_seq == 2
    assert bench.writer._machines[bucket].fencing_epoch == grant.epoch + 1


async def test_a_bucket_that_is_given_back_answers_what_it_took_and_sends_the_rest_away(
    bench: LeasedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = bench.hold_commits(monkeypatch)
    bucket = ids.conversation_bucket("t", DM, BUCKETS)
    asked = [asyncio.create_task(bench.acked(f"line {n}")) for n in range(20)]
    await asyncio.sleep(0)
    await until(lambda: bench.writer._machines[bucket]._in_call)
    closing = asyncio.create_task(bench.writer.close_shard(bucket))
    await asyncio.sleep(0)
    assert int((await bench.refused("late")).code) == ErrorCode.REGION_FAILOVER
    gate.set()
    assert [ack.conversation_seq for ack in await asyncio.gather(*asked)] == list(range(1, 21))
    await closing
    assert bucket not in bench.writer._machines


async def test_a_dropped_bucket_sends_its_queue_away_and_answers_for_what_the_store_has(
    bench: LeasedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = bench.hold_commits(monkeypatch)
    bucket = ids.conversation_bucket("t", DM, BUCKETS)
    first = asyncio.create_task(bench.send("one"))
    await asyncio.sleep(0)
    await until(lambda: bench.writer._machines[bucket]._in_call)
    second = asyncio.create_task(bench.send("two"))
    await asyncio.sleep(0)
    await until(lambda: bench.writer._unanswered == 2)
    bench.writer.drop_shard(bucket)
    assert int((await second).error.code) == ErrorCode.REGION_FAILOVER
    gate.set()
    assert (await first).ack.conversation_seq == 1


async def test_a_dropped_bucket_is_not_committed_to_again_after_a_broken_call(
    bench: LeasedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = bench.hold_commits(monkeypatch)
    bench.model.before.append(StoreUnavailable("link broke"))
    bucket = ids.conversation_bucket("t", DM, BUCKETS)
    asked = asyncio.create_task(bench.send("one"))
    await asyncio.sleep(0)
    await until(lambda: bench.writer._machines[bucket]._in_call)
    bench.writer.drop_shard(bucket)
    gate.set()
    assert int((await asked).error.code) == ErrorCode.REGION_FAILOVER
    assert bench.model.calls == [1]


async def test_a_writer_that_drains_gives_everything_back(bench: LeasedBench) -> None:
    await bench.acked("hello")
    await bench.writer.drain()
    assert (await bench.registry.routes()).routes[LeaseKind.CONVERSATION_BUCKET] == {}
    assert not bench.writer.ready()
