"""What a mailbox role forgets, on the models; the scripts are compared with them in tests/contract."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from qim.core import ids
from qim.obs import metrics
from qim.shard_workers.log_retention import LogRetention
from qim.shard_workers.mailbox.retention import (
    SUSPECTS_MAX,
    CapSampler,
    FoldHistory,
    MailboxRetention,
    MailboxRetentionSettings,
    dispatch_created_at_ms,
)
from qim.stores.api import ChunkAppend, RangeRequest
from tests.unit.shard_workers.pipeline import SHARDS, TENANT, Pipeline, eventually

AB = ids.direct_conversation_id("alice", "bob")
BOB_SHARD = ids.mailbox_shard_id(TENANT, "bob", SHARDS)


def chunk(users: list[str]) -> ChunkAppend:
    return ChunkAppend(
        log_offset=0, lanes=[(0, len(users))], chunk_index=0, chunk_count=1, chunk_size=100, mailbox_seq=1,
        tenant_id="t",
        conversation_id="dm:a:b", created_at_ms=0, common=b"",
        recipients=[(user, 0, bytes(8), b"") for user in users],
    )  # fmt: skip


def test_every_growing_mailbox_is_met_long_before_it_is_far_above_the_cap() -> None:
    sampler = CapSampler(50_000, random.Random(1).random)
    users = [f"u{n}" for n in range(200)]  # a group whose size is the mean distance
    entries, met = 0, dict.fromkeys(users, 0)
    while not all(met.values()):
        sampler.appended(3, [chunk(users)])
        entries += 1
        for _, _, user in sampler.suspects:
            met[user] += 1
        sampler.suspects.clear()
    assert entries < 3_000, "at least one look each 3,000 entries, 6 % of the cap"


def test_looks_are_rare_and_waiting_mailboxes_bounded() -> None:
    sampler = CapSampler(50_000, random.Random(1).random)
    for n in range(10_000):
        sampler.appended(0, [chunk([f"u{n}"])])
    assert 25 < len(sampler.suspects) < 100
    every = CapSampler(1, random.Random(1).random)
    for n in range(SUSPECTS_MAX + 10):
        every.appended(0, [chunk([f"u{n}"])])
    assert len(every.suspects) == SUSPECTS_MAX


def test_a_fold_counts_once_it_is_stored_for_long_enough() -> None:
    history = FoldHistory()
    assert history.safe_offset(0, 60) == 0
    history.observe(0, -1)
    assert history.safe_offset(100, 60) == 0
    history.observe(100, 4095)
    history.observe(120, 4095)
    history.observe(130, 8191)
    assert history.safe_offset(159, 60) == 0
    assert history.safe_offset(160, 60) == 4096
    assert history.safe_offset(190, 60) == 8192


def test_a_fold_that_went_back_takes_what_was_above_it_along() -> None:
    history = FoldHistory()
    history.observe(0, 4095)
    history.observe(50, 8191)
    history.observe(55, 4095)
    assert history.safe_offset(1_000, 60) == 4096


@pytest.fixture
async def world() -> AsyncIterator[Pipeline]:
    pipeline = Pipeline()
    yield pipeline
    await pipeline.close()


async def entries_of_bob(world: Pipeline, epoch: int) -> list[int]:
    lane = ids.lane_id(TENANT, "bob", world.lane_count)
    request = RangeRequest(
        tenant_id=TENANT, user_id="bob", shard=BOB_SHARD, shard_epoch=epoch, lane=lane, after_seq=0,
        up_to_seq=1 << 62, max_items=10_000, max_bytes=1 << 24,
    )  # fmt: skip
    return [row.mailbox_seq for row in (await world.mailbox.range_scan(request)).rows]


async def test_the_cap_is_enforced_and_counted(world: Pipeline) -> None:
    await world.start_fanout()
    role = await world.start_mailbox()
    for n in range(30):
        await world.send(AB, "alice", f"{n}")
    epoch = role._shards[BOB_SHARD].machine.shard_epoch

    async def there() -> bool:
        return role.ready() and len(await entries_of_bob(world, epoch)) == 30

    await eventually(there)
    before = metrics.MAILBOX_ENTRY_CAP_EVICTED_TOTAL.labels(tenant=TENANT)._value.get()
    settings = MailboxRetentionSettings(entries_max=20, hysteresis=0.8)
    retention = MailboxRetention(role._shards, world.mailbox, None, world.clock, settings, random_unit=lambda: 0.5)
    retention.sampler.suspects[BOB_SHARD, TENANT, "bob"] = None
    all_entries = await entries_of_bob(world, epoch)
    assert await retention.enforce_caps() == 14
    assert retention.sampler.suspects == {}
    assert await entries_of_bob(world, epoch) == all_entries[14:]
    assert metrics.MAILBOX_ENTRY_CAP_EVICTED_TOTAL.labels(tenant=TENANT)._value.get() - before == 14
    assert metrics.firing_alerts(metrics.render().decode())["mailbox_entry_cap_evicted_total"] == "P2"
    assert await retention.enforce_cap(BOB_SHARD, TENANT, "bob") == 0
    assert await retention.enforce_cap(SHARDS + 1, TENANT, "bob") == 0, "a shard that is not ours"


async def test_a_role_meets_the_mailboxes_it_writes(world: Pipeline) -> None:
    await world.start_fanout()
    role = await world.start_mailbox()
    met = role.retention.sampler
    met._left = 1
    await world.send(AB, "alice", "hello")

    async def found() -> bool:
        return bool(met.suspects)

    await eventually(found)
    ((shard, tenant_id, user_id),) = met.suspects
    assert (shard, tenant_id) == (ids.mailbox_shard_id(TENANT, user_id, SHARDS), TENANT)
    assert user_id in ("alice", "bob")
    assert role._shards[shard].retention_view() == (role._shards[shard].machine.shard_epoch, -1)


async def test_the_dispatch_log_goes_below_the_fold_only(world: Pipeline) -> None:
    class Shard:
        saved = 9

        def retention_view(self) -> tuple[int, int] | None:
            return 1, self.saved

    class Clock:
        now_ms = 0.0

        def monotonic_ms(self) -> float:
            return self.now_ms

        def unix_ms(self) -> int:
            return 10**15

    clock, shard = Clock(), Shard()
    await world.dispatch_log.append([(BOB_SHARD, b"")] * 20)
    log = LogRetention(
        "dispatch", world.dispatch_log, partition_count=SHARDS, created_at_ms=dispatch_created_at_ms,
        retention_ms=1000, bytes_max=1 << 30, clock=clock,
    )  # fmt: skip
    settings = MailboxRetentionSettings(fold_age_ms=60_000)
    retention = MailboxRetention({BOB_SHARD: shard}, world.mailbox, log, clock, settings, random_unit=lambda: 0.5)
    assert await retention.trim_logs() == 0
    clock.now_ms = 59_999
    assert await retention.trim_logs() == 0
    clock.now_ms = 60_000
    assert await retention.trim_logs() == 10
    assert (await world.dispatch_log.watermarks(BOB_SHARD)).low == 10
