"""Takeover and reload of one shard; its ordinary work is in test_runner.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from qim.core import ids
from qim.core.seq import SHARD_EPOCH_MAX, LaneVector, log_offset_of, mailbox_seq
from qim.errors import StoreError, StoreUnavailable
from qim.obs import metrics
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import SHARD_MOVED
from qim.registry.api import EpochBoundary, Grant, LeaseKind
from qim.shard_workers.mailbox.expand import Dispatch
from qim.shard_workers.mailbox.machine import FOLD_SAVE_RECORDS
from qim.shard_workers.mailbox.runner import MailboxRole
from qim.shard_workers.mailbox.shard import ShardRunner
from qim.stores.api import AppendCall, AppendResult, AppendStatus
from tests.unit.shard_workers.mailbox.making import packed_dispatch
from tests.unit.shard_workers.pipeline import LANES, SHARDS, TENANT, Pipeline, eventually

AB = ids.direct_conversation_id("alice", "bob")
BOB_SHARD = ids.mailbox_shard_id(TENANT, "bob", SHARDS)
BOB_LANE = ids.lane_id(TENANT, "bob", LANES)


@pytest.fixture
async def world() -> AsyncIterator[Pipeline]:
    pipeline = Pipeline()
    await pipeline.start_fanout()
    await pipeline.start_mailbox()
    await eventually(lambda: pipeline.roles["mailbox-0"].ready())
    yield pipeline
    await pipeline.close()


def runner_of(world: Pipeline) -> ShardRunner:
    role = world.roles["mailbox-0"]
    assert isinstance(role, MailboxRole)
    return role._shards[BOB_SHARD]


async def arrived(world: Pipeline, count: int) -> None:
    async def there() -> bool:
        return not (await world.pull("bob")).HasField("error") and len(await world.texts("bob")) >= count

    await eventually(there)
    assert await world.texts("bob") == [f"line {n}" for n in range(count)]


async def send(world: Pipeline, first: int, count: int) -> None:
    for n in range(first, first + count):
        await world.send(AB, "alice", f"line {n}")


async def restart(world: Pipeline) -> None:
    await world.kill("mailbox-0")
    await world.start_mailbox()
    await eventually(lambda: world.roles["mailbox-0"].ready())


async def test_boundaries_tell_which_epoch_owned_which_offset(world: Pipeline) -> None:
    await send(world, 0, 3)
    await arrived(world, 3)
    await restart(world)
    await send(world, 3, 2)
    await arrived(world, 5)
    assert await world.registry.boundaries(BOB_SHARD) == [
        EpochBoundary(1, mailbox_seq(1, 0), 0),
        EpochBoundary(2, mailbox_seq(2, 3), mailbox_seq(1, 2)),
    ]
    assert [entry.mailbox_seq for entry in await world.entries("bob")] == [
        *(mailbox_seq(1, n) for n in range(3)), *(mailbox_seq(2, n) for n in (3, 4))
    ]  # fmt: skip


async def test_the_last_epoch_under_another_grant_is_read_and_never_written(world: Pipeline) -> None:
    """26.6.6: no greater epoch can be had, so the successor of its owner has none."""
    await world.kill("mailbox-0")
    held = world.registry._leases[LeaseKind.MAILBOX_SHARD][BOB_SHARD]
    world.registry._leases[LeaseKind.MAILBOX_SHARD][BOB_SHARD] = held._replace(epoch=SHARD_EPOCH_MAX - 1)
    await world.start_mailbox()
    await send(world, 0, 2)
    await arrived(world, 2)
    role = world.roles["mailbox-0"]
    assert isinstance(role, MailboxRole)
    role.drop_shard(BOB_SHARD)
    await role.open_shard(Grant(LeaseKind.MAILBOX_SHARD, BOB_SHARD, "mailbox-0", SHARD_EPOCH_MAX, "successor"))
    await eventually(role.ready)
    await send(world, 2, 1)
    runner = runner_of(world)
    await eventually(lambda: runner.machine.next_offset == 3)
    await arrived(world, 2)
    assert runner.machine.read_only
    assert runner.machine.calls_in_flight() == 0
    assert runner.machine.acked[BOB_LANE] == mailbox_seq(SHARD_EPOCH_MAX, 1)
    assert runner.retention_view() is None


async def test_a_takeover_that_is_interrupted_finds_its_own_boundary(
    world: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(world, 0, 1)
    await arrived(world, 1)
    failing = 2
    progress = world.mailbox.progress

    async def interrupted(*arguments: int) -> object:
        nonlocal failing
        if failing:
            failing -= 1
            await send(world, 2 - failing, 1)
            raise StoreUnavailable("down")
        return await progress(*arguments)

    monkeypatch.setattr(world.mailbox, "progress", interrupted)
    await restart(world)
    await arrived(world, 3)
    assert len(await world.registry.boundaries(BOB_SHARD)) == 2


async def test_an_answer_that_is_lost_costs_nothing_and_marks_the_lane_dirty(
    world: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.login("bob", 7)
    append = world.mailbox.append
    lost = 1

    async def losing(call: AppendCall) -> AppendResult:
        nonlocal lost
        result = await append(call)
        if lost and any(user == "bob" for item in call.tenant_items for user, *_ in item.recipients):
            lost -= 1
            raise StoreUnavailable("answer lost")
        return result

    monkeypatch.setattr(world.mailbox, "append", losing)
    await send(world, 0, 1)
    await arrived(world, 1)
    assert lost == 0
    await eventually(lambda: 7 in world.gateway.dirty_connections())


async def test_chunks_of_another_size_are_replayed_as_they_were_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Pipeline(chunk_members=3, lane_count=1)
    await world.start_fanout()
    await world.start_mailbox()
    await eventually(lambda: world.roles["mailbox-0"].ready())
    members = [f"u{n}" for n in range(80)]
    group = await world.create_group("g", members)

    async def announced() -> bool:
        return all([await world.texts(user) for user in members])

    await eventually(announced)
    append = world.mailbox.append

    async def first_chunk_only(call: AppendCall) -> AppendResult:
        if any(item.chunk_index for item in call.tenant_items) or call.watermarks is not None:
            raise StoreUnavailable("cut")
        return await append(call)

    monkeypatch.setattr(world.mailbox, "append", first_chunk_only)
    role = world.roles["mailbox-0"]
    assert isinstance(role, MailboxRole)
    for runner in role._shards.values():
        runner.machine._entries_max = 1
    await world.send(group, "u0", "hello", version=1)

    def begun() -> bool:
        rows = [row for shard in world.mailbox._held.shards.values() for row in shard.progress.values()]
        return any(row.done == 1 and row.chunk_count > 1 for row in rows)

    await eventually(begun)
    await world.kill("mailbox-0")
    monkeypatch.setattr(world.mailbox, "append", append)
    world.chunk_members = 7
    await world.start_mailbox()
    await eventually(lambda: world.roles["mailbox-0"].ready())
    for user in members:
        assert await world.texts(user) == ["", "hello"]
    await world.close()


async def test_a_lost_dispatch_log_is_refused_not_served(world: Pipeline) -> None:
    await send(world, 0, 3)
    await arrived(world, 3)
    await world.kill("mailbox-0")
    world.dispatch_log._records_of(BOB_SHARD).clear()
    await world.start_mailbox()
    assert (await world.login("bob", 7)).error.code == SHARD_MOVED
    assert not world.roles["mailbox-0"].ready()


async def test_a_shard_the_registry_gave_away_stops_at_its_next_reload(world: Pipeline) -> None:
    await world.registry.grant(LeaseKind.MAILBOX_SHARD, [BOB_SHARD], "mailbox-9", "other")
    runner_of(world).doubt("test")
    await eventually(lambda: bool(world.failures))
    assert not world.roles["mailbox-0"].ready()


async def test_a_restart_folds_on_from_what_was_saved(world: Pipeline) -> None:
    world.hub.members["fanout-0"].lose = lambda opcode: opcode == InternalOpcode.DISPATCH_HINT
    await send(world, 0, FOLD_SAVE_RECORDS + 20)
    last = FOLD_SAVE_RECORDS + 19
    await eventually(lambda: log_offset_of(runner_of(world).machine.acked[BOB_LANE]) == last, timeout_s=30)
    saved = await world.mailbox.load_shard(BOB_SHARD, 1)
    assert saved.fold_offset == FOLD_SAVE_RECORDS - 1
    await restart(world)
    assert runner_of(world).machine.next_offset == FOLD_SAVE_RECORDS + 20
    await world.send(AB, "alice", "after")
    await eventually(lambda: log_offset_of(runner_of(world).machine.acked[BOB_LANE]) == last + 1)


async def test_a_refused_append_reloads_and_goes_on(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    append, refusals = world.mailbox.append, 3

    async def refusing(call: AppendCall) -> AppendResult:
        nonlocal refusals
        if refusals:
            refusals -= 1
            return AppendResult(status=AppendStatus.W_MOVED)
        return await append(call)

    monkeypatch.setattr(world.mailbox, "append", refusing)
    await send(world, 0, 5)
    await arrived(world, 5)
    assert runner_of(world).machine.acked == list(LaneVector((mailbox_seq(1, 4),) * LANES).values)


async def test_what_waits_is_as_old_as_its_commit_but_a_backlog_only_as_the_takeover(world: Pipeline) -> None:
    """Lag shows the queues in between, too; sending does not depend on a recovery."""
    runner = runner_of(world)

    def since_ms(offset: int, age_ms: int) -> float:
        dispatch = Dispatch(offset, packed_dispatch(["bob"]))
        dispatch.record.created_at = world.clock.unix_ms() - age_ms
        return runner._since_ms(dispatch)

    now_ms = world.clock.monotonic_ms()
    assert since_ms(runner.machine.high, 5000) == pytest.approx(now_ms - 5000, abs=1000)
    assert since_ms(runner.machine.high, -5000) >= now_ms, "a clock that is ahead makes nothing younger than now"
    assert since_ms(runner.machine.high - 1, 5000) >= now_ms


async def test_a_store_without_room_is_tried_ever_more_rarely_and_read_meanwhile(
    world: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(world, 0, 1)
    await arrived(world, 1)
    calls = 0
    append = world.mailbox.append

    async def full(call: AppendCall) -> AppendResult:
        nonlocal calls
        calls += 1
        raise StoreError("OOM command not allowed")

    monkeypatch.setattr(world.mailbox, "append", full)
    await send(world, 1, 1)

    def tried(count: int) -> bool:
        return calls >= count

    await eventually(lambda: tried(4))
    assert await world.texts("bob") == ["line 0"], "what is there can be read"
    before, began_s = calls, time.monotonic()
    await asyncio.sleep(0.2)
    at_most = 4 * (time.monotonic() - began_s) / 0.2
    assert calls - before <= at_most, "two users' shards, each waits 0.1 s and more by now"
    monkeypatch.setattr(world.mailbox, "append", append)
    await arrived(world, 2)


async def test_a_w_below_one_that_was_told_is_counted_and_not_told(world: Pipeline) -> None:
    await send(world, 0, 2)
    await arrived(world, 2)
    before = metrics.MAILBOX_SEQ_REGRESSION_COUNT._value.get()
    runner = runner_of(world)
    told = runner.machine.watermark(BOB_LANE)
    assert runner.machine.publish(BOB_LANE, told)
    assert not runner.machine.publish(BOB_LANE, told - 1)
    runner.note_regressions()
    assert metrics.MAILBOX_SEQ_REGRESSION_COUNT._value.get() == before + 1
    metrics.MAILBOX_SEQ_REGRESSION_COUNT.set(before)
